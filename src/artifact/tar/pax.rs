//! Records of a pax extended header: `LENGTH KEY=VALUE\n`, again and again.
//!
//! Main type: [`Extension`], the few keys that matter. Facts: POSIX.1-2017 pax(1), "pax Header Block"; GNU tar
//! manual, "Storing Sparse Files".

use crate::artifact::rejection::{Rejection, Rule};

/// Longest extended header that is read, bytes. Real ones are a few hundred; with extended attributes some thousands.
pub const MAX: u64 = 1 << 20;

/// What an extended header says about the next member. An absent or emptied key leaves the header's own field.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Extension {
    /// `path`
    pub path: Option<Vec<u8>>,
    /// `linkpath`
    pub link: Option<Vec<u8>>,
    /// `size`
    pub size: Option<u64>,
    /// `GNU.sparse.*`
    pub sparse: Option<Sparse>,
}

/// What GNU and libarchive say about a sparse file, in one of three versions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sparse {
    /// `GNU.sparse.major` and `.minor`; absent in 0.0 and 0.1.
    pub major: Option<u64>,
    /// See `major`.
    pub minor: Option<u64>,
    /// `GNU.sparse.name`: the real name (0.1, 1.0).
    pub name: Option<Vec<u8>>,
    /// `GNU.sparse.size` (0.x) or `GNU.sparse.realsize` (1.0): the logical size.
    pub size: Option<u64>,
    /// `GNU.sparse.map` (0.1): comma-separated; or the pairs of `offset` and `numbytes` (0.0), in order.
    pub map: Vec<u64>,
}

impl Extension {
    /// Reads all records.
    ///
    /// # Errors
    /// [`Rule::Corrupt`] for anything that isn't exactly in the form: a lenient reader sees other records than a
    /// strict one.
    pub fn parse(mut data: &[u8]) -> Result<Self, Rejection> {
        let mut extension = Extension::default();
        while !data.is_empty() {
            let (key, value, rest) = record(data).ok_or_else(|| bad("a record is malformed"))?;
            extension.take(key, value)?;
            data = rest;
        }
        Ok(extension)
    }

    /// Whether it names anything that can't hold for every member, as a global header would have it.
    pub fn is_specific(&self) -> bool {
        *self != Extension::default()
    }

    fn take(&mut self, key: &[u8], value: &[u8]) -> Result<(), Rejection> {
        let bytes = || (!value.is_empty()).then(|| value.to_vec());
        let number = || decimal(value).ok_or_else(|| bad("a number is none"));
        match key {
            b"path" => self.path = bytes(),
            b"linkpath" => self.link = bytes(),
            b"size" if value.is_empty() => self.size = None,
            b"size" => self.size = Some(number()?),
            _ => {
                let Some(key) = key.strip_prefix(b"GNU.sparse.") else { return Ok(()) };
                let sparse = self.sparse.get_or_insert_default();
                match key {
                    b"major" => sparse.major = Some(number()?),
                    b"minor" => sparse.minor = Some(number()?),
                    b"name" => sparse.name = bytes(),
                    b"size" | b"realsize" => sparse.size = Some(number()?),
                    b"numblocks" => {}
                    b"map" => {
                        sparse.map = value
                            .split(|&b| b == b',')
                            .map(decimal)
                            .collect::<Option<_>>()
                            .ok_or_else(|| bad("a sparse map is malformed"))?;
                    }
                    b"offset" | b"numbytes" => {
                        // They must alternate: the first of each pair is an offset.
                        if (key == b"offset") != sparse.map.len().is_multiple_of(2) {
                            return Err(bad("a sparse map is out of order"));
                        }
                        sparse.map.push(number()?);
                    }
                    _ => return Err(bad("a sparse key is not known")),
                }
            }
        }
        Ok(())
    }
}

/// One record and what follows it.
fn record(data: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = data.iter().take(20).position(|&b| b == b' ')?;
    let length = usize::try_from(decimal(&data[..space])?).ok()?;
    let body = data.get(space + 1..length)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|&b| b == b'=')?;
    Some((&body[..equals], &body[equals + 1..], &data[length..]))
}

/// Decimal digits and nothing else.
pub fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() {
        return None;
    }
    text.iter().try_fold(0_u64, |value, &byte| match byte {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(byte - b'0')),
        _ => None,
    })
}

fn bad(what: &str) -> Rejection {
    Rejection::new(Rule::Corrupt, format!("in a pax header, {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_and_the_last_of_a_key_counts() {
        let extension = Extension::parse(b"10 path=a\n10 path=b\n9 size=7\n30 mtime=1350244992.023960108\n").unwrap();
        assert_eq!(extension.path.as_deref(), Some(&b"b"[..]));
        assert_eq!(extension.size, Some(7));
        // A newline or an equals sign inside a value is the value's.
        let odd = Extension::parse(b"16 path=a\nb=c\nd\n").unwrap();
        assert_eq!(odd.path.as_deref(), Some(&b"a\nb=c\nd"[..]));
        assert_eq!(Extension::parse(b"10 path=a\n8 path=\n").unwrap().path, None);
    }

    #[test]
    fn malformed_records_are_refused() {
        for data in [
            &b"10 path=ab\n"[..],
            b"99 path=a\n",
            b"0 path=a\n",
            b"3 path=a\n",
            b"10 path=a ",
            b"path=a\n",
            b"9 path a\n",
            b"+10 path=a\n",
            b"18446744073709551616 path=a\n",
            b"10 size=-1\n",
            b"11 size=0x1\n",
            b"29 size=18446744073709551616\n",
            b"10 path=a\n\0\0",
            b"22 GNU.sparse.map=0,,\n",
            b"25 GNU.sparse.numbytes=1\n",
        ] {
            let result = Extension::parse(data);
            assert!(result.is_err(), "{:?} {result:?}", String::from_utf8_lossy(data));
        }
    }

    #[test]
    fn only_what_describes_one_member_is_specific() {
        assert!(!Extension::parse(b"19 comment=abcdefg\n").unwrap().is_specific());
        assert!(Extension::parse(b"10 path=a\n").unwrap().is_specific());
        assert!(Extension::parse(b"9 size=7\n").unwrap().is_specific());
    }
}
