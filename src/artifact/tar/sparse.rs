//! Sparse members: files of which only the parts with data are stored.
//!
//! Main type: [`Map`], checked: segments in order, apart, inside the logical size, and together as long as what is
//! stored. Four spellings exist: GNU's old header, and pax versions 0.0, 0.1 and 1.0 (the one that bsdtar, so also
//! macOS and Windows, writes by itself). Facts: GNU tar manual, "Storing Sparse Files".

use std::io::BufRead;

use super::header::{Block, number};
use super::pax::{Sparse, decimal};
use super::reader::read_block;
use crate::artifact::rejection::{Error, Rejection, Rule};

/// Most segments that one file may have.
const MAX_SEGMENTS: usize = 65_536;

/// Where the stored bytes of a sparse file belong.
#[derive(Debug, PartialEq, Eq)]
pub struct Map {
    /// Offset and length of each stored part.
    pub segments: Vec<(u64, u64)>,
    /// The logical size.
    pub size: u64,
}

impl Map {
    /// Checks numbers as they come: offset, length, offset, length, …
    fn new(numbers: &[u64], size: u64, stored: u64) -> Result<Self, Rejection> {
        let (pairs, []) = numbers.as_chunks::<2>() else {
            return Err(bad("a segment has an offset but no length"));
        };
        let mut segments = Vec::with_capacity(pairs.len());
        let mut end = 0;
        let mut total = 0_u64;
        for &[offset, length] in pairs {
            let past = offset.checked_add(length).filter(|&past| past <= size);
            let Some(past) = past else { return Err(bad("a segment lies beyond the file's size")) };
            if offset < end {
                return Err(bad("segments overlap or are out of order"));
            }
            end = past;
            // Can't wrap: the sum of disjoint parts of `size`.
            total += length;
            segments.push((offset, length));
        }
        if total != stored {
            return Err(bad("the segments are not as long as what is stored"));
        }
        Ok(Map { segments, size })
    }

    /// The old GNU header: four segments in the header itself, then blocks of 21 as long as a flag says so.
    pub fn from_gnu(header: &Block, stored: u64, input: &mut impl BufRead) -> Result<Self, Error> {
        let size = number(&header[483..495]).ok_or_else(|| bad("the real size is no number"))?;
        let mut numbers = Vec::new();
        take_gnu(&header[386..482], &mut numbers)?;
        let mut more = header[482] != 0;
        while more {
            let block = read_block(input)?;
            take_gnu(&block[..504], &mut numbers)?;
            more = block[504] != 0;
            limit(numbers.len())?;
        }
        Ok(Map::new(&numbers, size, stored)?)
    }

    /// A pax member. `stored` is what follows the header; in version 1.0 its first blocks are the map, and what they
    /// take is taken off `stored`.
    pub fn from_pax(pax: &Sparse, stored: &mut u64, input: &mut impl BufRead) -> Result<Self, Error> {
        let Some(size) = pax.size else {
            return Err(bad("the real size is missing").into());
        };
        match (pax.major.unwrap_or(0), pax.minor.unwrap_or(0)) {
            (0, 0 | 1) => {
                limit(pax.map.len())?;
                Ok(Map::new(&pax.map, size, *stored)?)
            }
            (1, 0) if pax.map.is_empty() => Ok(Map::new(&in_data(stored, input)?, size, *stored)?),
            _ => Err(bad("its version is not known").into()),
        }
    }
}

/// Version 1.0: decimal numbers, each with a newline, in whole blocks before the data; the first is the number of
/// segments.
fn in_data(stored: &mut u64, input: &mut impl BufRead) -> Result<Vec<u64>, Error> {
    let mut numbers = Vec::new();
    let mut wanted = None;
    let mut digits: Vec<u8> = Vec::new();
    loop {
        *stored = stored.checked_sub(512).ok_or_else(|| bad("the map is longer than the member"))?;
        for byte in read_block(input)? {
            if byte != b'\n' {
                digits.push(byte);
                if digits.len() > 20 {
                    return Err(bad("the map holds something that is no number").into());
                }
                continue;
            }
            let value = decimal(&digits).ok_or_else(|| bad("the map holds something that is no number"))?;
            digits.clear();
            match wanted {
                None => {
                    let count = usize::try_from(value).unwrap_or(usize::MAX).saturating_mul(2);
                    limit(count)?;
                    wanted = Some(count);
                }
                Some(_) => numbers.push(value),
            }
            if wanted == Some(numbers.len()) {
                return Ok(numbers);
            }
        }
    }
}

fn take_gnu(entries: &[u8], numbers: &mut Vec<u64>) -> Result<(), Rejection> {
    for entry in entries.as_chunks::<24>().0 {
        // An unused slot is all NUL; a used one with length 0 marks the end of the file.
        if entry.iter().all(|&b| b == 0) {
            break;
        }
        for field in [&entry[..12], &entry[12..]] {
            numbers.push(number(field).ok_or_else(|| bad("the map holds something that is no number"))?);
        }
    }
    Ok(())
}

fn limit(numbers: usize) -> Result<(), Rejection> {
    if numbers > 2 * MAX_SEGMENTS {
        return Err(bad("there are more than 65536 segments"));
    }
    Ok(())
}

fn bad(what: &str) -> Rejection {
    Rejection::new(Rule::Sparse, format!("in its sparse map, {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_must_be_ordered_apart_inside_and_as_long_as_the_data() {
        let map = Map::new(&[0, 10, 100, 5, 200, 0], 200, 15).unwrap();
        assert_eq!(map.segments, [(0, 10), (100, 5), (200, 0)]);
        for (numbers, size, stored) in [
            (&[0][..], 10, 0),
            (&[0, 10], 10, 9),
            (&[0, 10], 9, 10),
            (&[5, 5, 0, 5], 20, 10),
            (&[0, 6, 5, 5], 20, 11),
            (&[u64::MAX, 2], u64::MAX, 2),
        ] {
            assert_eq!(Map::new(numbers, size, stored).unwrap_err().rule, Rule::Sparse, "{numbers:?}");
        }
    }

    fn in_blocks(text: &[u8]) -> Result<Vec<u64>, Error> {
        let mut data = text.to_vec();
        data.resize(data.len().next_multiple_of(512), 0);
        let mut stored = data.len() as u64;
        in_data(&mut stored, &mut &data[..])
    }

    #[test]
    fn a_map_in_the_data_is_bounded_by_it() {
        assert_eq!(in_blocks(b"2\n0\n10\n100\n5\n").unwrap(), [0, 10, 100, 5]);
        assert!(in_blocks(b"0\n").unwrap().is_empty());
        assert!(in_blocks(b"2\n0\n10\n").is_err());
        assert!(in_blocks(b"99999999\n0\n").is_err());
        assert!(in_blocks(b"123456789012345678901234567890\n").is_err());
        assert!(in_blocks(&[b'1'; 1024]).is_err());
        // The map says that it goes on beyond the member.
        assert!(in_data(&mut 100, &mut &[b'1'; 512][..]).is_err());
    }
}
