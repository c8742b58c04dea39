//! From the tree of [`super::yaml`] to serde structs, with errors that keep what they know: the key path, the unknown
//! key and the ones known there.

use serde::de::{self, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

use super::super::place::{KeyPath, Spot, shown};
use super::yaml::{Node, Scalar, ScalarKind};

/// What did not fit, and where.
#[derive(Debug)]
pub(super) struct Misfit {
    pub(super) path: Option<KeyPath>,
    pub(super) spot: Spot,
    pub(super) kind: MisfitKind,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum MisfitKind {
    UnknownKey { key: String, known: &'static [&'static str] },
    MissingKey(&'static str),
    Other(String),
}

impl Misfit {
    fn new(kind: MisfitKind) -> Misfit {
        Misfit { path: None, spot: Spot::Value, kind }
    }

    /// The innermost place wins.
    fn at(mut self, path: &KeyPath, spot: Spot) -> Misfit {
        if self.path.is_none() {
            self.path = Some(path.clone());
            self.spot = spot;
        }
        self
    }
}

impl std::fmt::Display for Misfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for Misfit {}

impl de::Error for Misfit {
    fn custom<T: std::fmt::Display>(message: T) -> Self {
        Misfit::new(MisfitKind::Other(message.to_string()))
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        let found = match found {
            Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
            Unexpected::Seq => "a list".to_owned(),
            Unexpected::Map => "a mapping".to_owned(),
            Unexpected::Str(text) => format!("`{}`", shown(text)),
            other => other.to_string(),
        };
        Misfit::new(MisfitKind::Other(format!("expected {expected}, found {found}")))
    }

    fn unknown_field(key: &str, known: &'static [&'static str]) -> Self {
        Misfit::new(MisfitKind::UnknownKey { key: key.to_owned(), known })
    }

    fn missing_field(key: &'static str) -> Self {
        Misfit::new(MisfitKind::MissingKey(key))
    }
}

/// A node as serde sees it.
pub(super) struct NodeDeserializer<'n> {
    pub(super) node: &'n Node,
    pub(super) path: KeyPath,
}

impl<'n> NodeDeserializer<'n> {
    fn misfit(&self, expected: &dyn de::Expected) -> Misfit {
        let found = match self.node {
            Node::Scalar(Scalar { text, kind }) if *kind != ScalarKind::Null => format!("`{}`", shown(text)),
            other => other.describe().to_owned(),
        };
        Misfit::new(MisfitKind::Other(format!("expected {expected}, found {found}"))).at(&self.path, Spot::Value)
    }
}

impl<'de> Deserializer<'de> for NodeDeserializer<'_> {
    type Error = Misfit;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        let path = self.path;
        let result = match self.node {
            Node::Scalar(Scalar { kind: ScalarKind::Null, .. }) => visitor.visit_unit(),
            Node::Scalar(Scalar { kind: ScalarKind::Bool(value), .. }) => visitor.visit_bool(*value),
            Node::Scalar(Scalar { text, .. }) => visitor.visit_str(text),
            Node::List(items) => visitor.visit_seq(Items { items: items.iter(), next: 0, path: &path }),
            Node::Map(entries) => visitor.visit_map(Entries { entries: entries.iter(), value: None, path: &path }),
        };
        result.map_err(|misfit| misfit.at(&path, Spot::Value))
    }

    /// A number or a boolean is text where text is wanted, as it was written.
    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match self.node {
            Node::Scalar(Scalar { text, kind }) if *kind != ScalarKind::Null => {
                visitor.visit_str(text).map_err(|misfit: Misfit| misfit.at(&self.path, Spot::Value))
            }
            _ => Err(self.misfit(&visitor)),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match self.node {
            Node::Scalar(Scalar { kind: ScalarKind::Bool(value), .. }) => visitor.visit_bool(*value),
            _ => Err(self.misfit(&"true or false")),
        }
    }

    /// A key without a value is a key left out.
    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        if self.node.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match self.node {
            Node::List(_) => self.deserialize_any(visitor),
            _ => Err(self.misfit(&"a list")),
        }
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        match self.node {
            Node::Map(_) => self.deserialize_any(visitor),
            _ => Err(self.misfit(&"a mapping")),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Misfit> {
        self.deserialize_map(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, Misfit> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Misfit> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct enum
        identifier
    }
}

struct Items<'n, 'p> {
    items: std::slice::Iter<'n, Node>,
    next: usize,
    path: &'p KeyPath,
}

impl<'de> SeqAccess<'de> for Items<'_, '_> {
    type Error = Misfit;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Misfit> {
        let Some(node) = self.items.next() else { return Ok(None) };
        let path = self.path.item(self.next);
        self.next += 1;
        seed.deserialize(NodeDeserializer { node, path }).map(Some)
    }
}

struct Entries<'n, 'p> {
    entries: std::slice::Iter<'n, (String, Node)>,
    value: Option<(&'n str, &'n Node)>,
    path: &'p KeyPath,
}

impl<'de> MapAccess<'de> for Entries<'_, '_> {
    type Error = Misfit;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Misfit> {
        let Some((key, node)) = self.entries.next() else { return Ok(None) };
        self.value = Some((key, node));
        seed.deserialize(key.as_str().into_deserializer())
            .map(Some)
            .map_err(|misfit: Misfit| misfit.at(&self.path.key(key), Spot::Key))
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Misfit> {
        let Some((key, node)) = self.value.take() else { return Err(de::Error::custom("a value before its key")) };
        seed.deserialize(NodeDeserializer { node, path: self.path.key(key) })
    }
}
