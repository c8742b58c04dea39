//! One 512-byte tar header block, its fields decoded strictly.
//!
//! Facts: POSIX.1-2017 pax(1) "ustar Interchange Format"; GNU tar manual "Basic Tar Format"; tar(5) of libarchive.

use crate::artifact::rejection::{Rejection, Rule};

/// A block.
pub type Block = [u8; 512];

/// What a header announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// `0`, NUL (old) or `7` (contiguous).
    File,
    /// `1`
    Hardlink,
    /// `2`
    Symlink,
    /// `5`. An old-style file whose name ends in a slash is one too, but that is only known once the name is.
    Directory,
    /// `S`: a sparse file in the old GNU way.
    GnuSparse,
    /// `x`: extended header for the next member.
    Pax,
    /// `g`: extended header for all that follow.
    PaxGlobal,
    /// `L`: the next member's name.
    LongName,
    /// `K`: the next member's link target.
    LongLink,
    /// `3`, `4`, `6`: a device or FIFO; with words for people.
    Special(&'static str),
    /// What else there is; with words for people.
    Refused(&'static str),
}

/// The decoded fields that matter here. Owner, group and times are not read at all.
#[derive(Debug)]
pub struct Header {
    /// The kind of member.
    pub kind: Type,
    /// The name; with the ustar prefix where that is one.
    pub name: Vec<u8>,
    /// The target of a link.
    pub link: Vec<u8>,
    /// Bytes of data that follow.
    pub size: u64,
    /// Whether any execute bit is set.
    pub executable: bool,
}

/// Whether the block carries a right checksum and so is a header.
pub fn is_header(block: &Block) -> bool {
    let Some(stored) = number(&block[148..156]) else { return false };
    let sum = |byte: fn(u8) -> i64| -> i64 {
        let outside = block[..148].iter().chain(&block[156..]);
        outside.map(|&b| byte(b)).sum::<i64>() + 8 * i64::from(b' ')
    };
    // Old tars summed signed bytes.
    i64::try_from(stored).is_ok_and(|stored| stored == sum(i64::from) || stored == sum(|b| i64::from(b as i8)))
}

impl Header {
    /// Decodes a block.
    ///
    /// # Errors
    /// [`Rule::Corrupt`] when the checksum is wrong or a number is none.
    pub fn parse(block: &Block) -> Result<Self, Rejection> {
        if !is_header(block) {
            return Err(Rejection::new(Rule::Corrupt, "a tar header's checksum is wrong"));
        }
        let mut name = text(&block[..100]).to_vec();
        // GNU uses the prefix field for other things; its magic has a space here. The version bytes that follow are
        // written differently by different tools and say nothing about the fields.
        if &block[257..263] == b"ustar\0" && block[345] != 0 {
            let mut whole = text(&block[345..500]).to_vec();
            whole.push(b'/');
            whole.append(&mut name);
            name = whole;
        }
        let bad =
            |what: &str| Rejection::new(Rule::Corrupt, format!("the {what} in its header is not a number")).at(&name);
        let size = number(&block[124..136]).ok_or_else(|| bad("size"))?;
        // Only the execute bits matter, and some tools leave the field blank.
        let mode = number(&block[100..108]).ok_or_else(|| bad("mode"))?;
        let kind = match block[156] {
            b'0' | b'\0' | b'7' => Type::File,
            b'1' => Type::Hardlink,
            b'2' => Type::Symlink,
            b'3' => Type::Special("a character device"),
            b'4' => Type::Special("a block device"),
            b'5' => Type::Directory,
            b'6' => Type::Special("a FIFO"),
            b'S' => Type::GnuSparse,
            b'x' => Type::Pax,
            b'g' => Type::PaxGlobal,
            b'L' => Type::LongName,
            b'K' => Type::LongLink,
            b'M' => Type::Refused("the rest of a file from another volume"),
            b'D' => Type::Refused("a directory listing of an incremental dump"),
            b'V' => Type::Refused("a volume label"),
            _ => Type::Refused("of a tar type that is not known"),
        };
        Ok(Header { kind, link: text(&block[157..257]).to_vec(), size, executable: mode & 0o111 != 0, name })
    }
}

/// A field up to its NUL.
pub fn text(field: &[u8]) -> &[u8] {
    field.split(|&b| b == 0).next().unwrap_or_default()
}

/// A number: octal digits between blanks and NULs, or GNU's base-256 when the top bit is set. Blank is 0. Negative
/// ones and what doesn't fit are none.
pub fn number(field: &[u8]) -> Option<u64> {
    if let Some((&first, rest)) = field.split_first()
        && first & 0x80 != 0
    {
        if first & 0x40 != 0 {
            return None;
        }
        return rest.iter().try_fold(u64::from(first & 0x3f), |value, &byte| {
            value.checked_mul(256).map(|value| value | u64::from(byte))
        });
    }
    let blank = |b: &u8| *b == b' ' || *b == 0;
    let start = field.iter().position(|b| !blank(b)).unwrap_or(field.len());
    let digits = &field[start..];
    let end = digits.iter().position(blank).unwrap_or(digits.len());
    if !digits[end..].iter().all(blank) {
        return None;
    }
    digits[..end].iter().try_fold(0_u64, |value, &byte| match byte {
        b'0'..=b'7' => value.checked_mul(8).map(|value| value + u64::from(byte - b'0')),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_octal_or_base_256_and_nothing_else() {
        for (field, value) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0", Some(0)),
            (b"77777777777\0", Some(0o77_777_777_777)),
            (b"\x80\0\0\0\0\0\0\x02\0\0\0\0", Some(2 << 32)),
            (b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", Some(u64::MAX)),
            (b"\x80\0\0\x01\0\0\0\0\0\0\0\0", None),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", None),
            (b"0000648\0", None),
            (b"12\x0034\0", None),
            (b"-1\0", None),
            (b"0x10\0", None),
        ] {
            assert_eq!(number(field), value, "{field:x?}");
        }
    }

    fn block(change: impl FnOnce(&mut Block)) -> Block {
        let mut header = ::tar::Header::new_ustar();
        header.set_path("name").unwrap();
        header.set_mode(0o755);
        header.set_size(5);
        change(header.as_mut_bytes());
        header.set_cksum();
        *header.as_bytes()
    }

    #[test]
    fn a_header_needs_its_checksum() {
        let mut good = block(|_| ());
        let header = Header::parse(&good).unwrap();
        assert_eq!((header.kind, &*header.name, header.size, header.executable), (Type::File, &b"name"[..], 5, true));
        good[0] ^= 1;
        assert_eq!(Header::parse(&good).unwrap_err().rule, Rule::Corrupt);
        assert!(!is_header(&[0; 512]));
    }

    #[test]
    fn odd_version_bytes_change_no_name() {
        let prefixed = |version: &[u8; 2]| {
            block(|b| {
                b[263..265].copy_from_slice(version);
                b[345..350].copy_from_slice(b"a/b/c");
            })
        };
        for version in [b"00", b"\0\0", b"99", b" \0"] {
            assert_eq!(Header::parse(&prefixed(version)).unwrap().name, b"a/b/c/name");
        }
        let gnu = block(|b| {
            b[257..265].copy_from_slice(b"ustar  \0");
            b[345..350].copy_from_slice(b"14000");
        });
        assert_eq!(Header::parse(&gnu).unwrap().name, b"name");
    }

    #[test]
    fn sizes_that_are_no_numbers_are_refused() {
        let minus = block(|b| b[124..136].fill(0xff));
        assert_eq!(Header::parse(&minus).unwrap_err().rule, Rule::Corrupt);
    }
}
