//! The envelope: DSSE v1 with one Ed25519 signature.
//!
//! `{"payload":"<base64>","payloadType":"application/vnd.in-toto+json","signatures":[{"keyid":"<hex>","sig":"<base64>"}]}` and a line feed,
//! without white space. What is signed is the pre-authentication encoding (PAE) of type and payload; the key id is a hint in
//! DSSE, and here has to be that of the key that verifies.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};

use super::key::{PublicKey, SigningKey};
use super::statement::Statement;
use crate::report::json_v1;

/// Type of the payload: an in-toto statement in JSON.
pub const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
/// Largest payload, bytes: the largest report, which is denser here than in `report.json`, and a subject for each output.
const MAX_PAYLOAD: usize = json_v1::MAX_BYTES + json_v1::MAX_BYTES / 2;
/// Largest envelope, bytes.
pub const MAX_BYTES: usize = MAX_PAYLOAD / 3 * 4 + 1024;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    payload: String,
    #[serde(rename = "payloadType")]
    payload_type: String,
    signatures: Vec<SignatureV1>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SignatureV1 {
    keyid: String,
    sig: String,
}

/// Why an envelope proves nothing.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It is larger than [`MAX_BYTES`].
    #[error("the envelope has more than {MAX_BYTES} bytes")]
    TooLarge,
    /// It is no JSON, or not of this shape.
    #[error("it is not a DSSE envelope: {0}")]
    Shape(#[source] serde_json::Error),
    /// It has the right shape and is not as plimsoll writes it.
    #[error("the envelope is not in the one form that plimsoll writes: {0}")]
    Form(&'static str),
    /// Something else is in it.
    #[error("the envelope holds something else than an in-toto statement")]
    PayloadType,
    /// A key that is not among those given.
    #[error("it is signed by the key {0}, which is not among those given")]
    UnknownKey(String),
    /// The signature is not that key's.
    #[error("the signature is not the key's: something was changed, or it was forged")]
    Signature,
    /// The payload is not a statement of plimsoll's.
    #[error("the statement is not one of plimsoll's: {0}")]
    Statement(String),
}

/// Checks an envelope against keys, and gives the statement in it.
///
/// # Errors
/// If it is malformed, no given key signed it, or it holds no statement of this version's.
pub fn open(envelope: &[u8], keys: &[PublicKey]) -> Result<Statement, OpenError> {
    read(envelope)?.prove(keys)
}

/// Reads an envelope without believing it.
///
/// # Errors
/// If it is malformed.
pub fn read(envelope: &[u8]) -> Result<Unproven, OpenError> {
    if envelope.len() > MAX_BYTES {
        return Err(OpenError::TooLarge);
    }
    let parsed: Envelope = serde_json::from_slice(envelope).map_err(OpenError::Shape)?;
    let [signature] = parsed.signatures.as_slice() else {
        return Err(OpenError::Form("there is not one signature"));
    };
    if parsed.payload_type != PAYLOAD_TYPE {
        return Err(OpenError::PayloadType);
    }
    let key_id = signature.keyid.clone();
    if key_id.len() != 64 || !key_id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
        return Err(OpenError::Form("the key id is no SHA-256 in lowercase hex"));
    }
    // The decoder takes one encoding of each value only: padded, and with no bits left over.
    let not_base64 = |_| OpenError::Form("a value is no base64");
    let payload = BASE64.decode(&parsed.payload).map_err(not_base64)?;
    let signature = BASE64.decode(&signature.sig).map_err(not_base64)?;
    let signature = signature.try_into().map_err(|_| OpenError::Form("the signature has not 64 bytes"))?;
    let unproven = Unproven { key_id, payload, signature };
    if unproven.bytes() == envelope { Ok(unproven) } else { Err(OpenError::Form("white space or escapes differ")) }
}

/// Puts a payload into an envelope.
pub(super) fn seal(key: &SigningKey, payload: &[u8]) -> Vec<u8> {
    let signature = key.sign(&pae(payload));
    Unproven { key_id: key.public().id().to_owned(), payload: payload.to_vec(), signature }.bytes()
}

/// The pre-authentication encoding: what is signed.
fn pae(payload: &[u8]) -> Vec<u8> {
    let mut message = format!("DSSEv1 {} {PAYLOAD_TYPE} {} ", PAYLOAD_TYPE.len(), payload.len()).into_bytes();
    message.extend_from_slice(payload);
    message
}

/// An envelope that was read, and not compared with any key.
#[derive(Debug)]
pub struct Unproven {
    key_id: String,
    payload: Vec<u8>,
    signature: [u8; 64],
}

impl Unproven {
    /// The key that it says it is signed by, 64 lowercase hex digits.
    #[must_use]
    pub fn key_id(&self) -> &str {
        &self.key_id
    }

    /// The statement, if one of the keys signed it. The payload is parsed only then.
    ///
    /// # Errors
    /// As [`open`].
    pub fn prove(&self, keys: &[PublicKey]) -> Result<Statement, OpenError> {
        let key = keys.iter().find(|key| key.id() == self.key_id);
        let key = key.ok_or_else(|| OpenError::UnknownKey(self.key_id.clone()))?;
        if !key.verifies(&pae(&self.payload), &self.signature) {
            return Err(OpenError::Signature);
        }
        self.statement()
    }

    /// The statement, whoever made it.
    ///
    /// # Errors
    /// If it is not one of this version's.
    pub fn statement(&self) -> Result<Statement, OpenError> {
        let statement = Statement::read(&self.payload).map_err(OpenError::Statement)?;
        if statement.predicate.signer.key_id == self.key_id {
            Ok(statement)
        } else {
            Err(OpenError::Statement("it names another key than the envelope".to_owned()))
        }
    }

    fn bytes(&self) -> Vec<u8> {
        // Base64, hex and a constant: nothing that JSON escapes.
        let (payload, sig) = (BASE64.encode(&self.payload), BASE64.encode(self.signature));
        let keyid = &self.key_id;
        format!(
            "{{\"payload\":\"{payload}\",\"payloadType\":\"{PAYLOAD_TYPE}\",\"signatures\":[{{\"keyid\":\"{keyid}\",\"sig\":\"{sig}\"}}]}}\n"
        )
        .into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of DSSE's protocol document, with our payload type in place of its own.
    #[test]
    fn the_encoding_is_that_of_dsse() {
        assert_eq!(pae(b"hello world"), b"DSSEv1 28 application/vnd.in-toto+json 11 hello world");
        assert_eq!(pae(b""), b"DSSEv1 28 application/vnd.in-toto+json 0 ");
    }

    #[test]
    fn an_envelope_has_one_form() {
        let key = SigningKey::generate().unwrap();
        let sealed = seal(&key, b"{}");
        read(&sealed).unwrap();
        let text = String::from_utf8(sealed).unwrap();
        let sig = &text[text.find("\"sig\"").unwrap()..];
        for (from, to) in [
            ("\n", ""),
            ("\n", "\n\n"),
            (":", ": "),
            ("payloadType", "payload\\u0054ype"),
            ("\"signatures\":[", "\"signatures\":[],\"x\":["),
            ("\"signatures\"", "\"payload\":\"e30=\",\"signatures\""),
            ("e30=", "e30"),
            // The same two bytes, with bits left over that mean nothing.
            ("e30=", "e31="),
            ("vnd.in-toto+json", "vnd.in-toto+jsom"),
            (key.public().id(), &key.public().id().to_uppercase()),
            (key.public().id(), ""),
            ("]}", &format!(",{{\"keyid\":\"\",{sig}")),
            ("[{", "[],\"a\":[{"),
        ] {
            let changed = text.replacen(from, to, 1);
            assert!(changed != text && read(changed.as_bytes()).is_err(), "{changed}");
        }
        assert!(matches!(read(&vec![b' '; MAX_BYTES + 1]), Err(OpenError::TooLarge)));
        assert!(matches!(read(b"[]"), Err(OpenError::Shape(_))));
    }

    #[test]
    fn the_signature_is_checked_before_the_payload_is_read() {
        let [key, other] = [(); 2].map(|()| SigningKey::generate().unwrap());
        let sealed = seal(&key, b"no statement");
        assert!(matches!(open(&sealed, &[]), Err(OpenError::UnknownKey(_))));
        assert!(matches!(open(&sealed, &[other.public().clone()]), Err(OpenError::UnknownKey(_))));
        let both = [other.public().clone(), key.public().clone()];
        assert!(matches!(open(&sealed, &both), Err(OpenError::Statement(_))));
        // Somebody else's signature under our key id.
        let forged = Unproven {
            key_id: key.public().id().to_owned(),
            payload: b"no statement".to_vec(),
            signature: other.sign(&pae(b"no statement")),
        };
        assert!(matches!(open(&forged.bytes(), &both), Err(OpenError::Signature)));
    }
}
