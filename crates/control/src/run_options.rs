//! Table `run` of a config file: the options of `forebay run`, by their names there.
//!
//! ```toml
//! [run]
//! devices = ["eth1", "tun:ft0"]
//! take = "udp:53"
//! queues = 2
//! check = true
//! ```

use forebay_sys::error::{Error, Result};
use toml::de::{DeTable, DeValue};

/// Option of a run, as a config file has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RunOption {
    /// Name, without dashes in front.
    pub name: String,
    /// Value, or values.
    pub value: OptionValue,
    /// Line of the file.
    pub line: usize,
}

/// Value of an option.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OptionValue {
    /// A flag that is given, or is not.
    Flag(bool),
    /// Values, in their order; one for an option that is given once.
    Texts(Vec<String>),
}

/// Reads the table. `line` returns the line at an offset, and `wrong` an error there.
pub(super) fn read(
    table: &DeTable<'_>,
    line: &impl Fn(usize) -> usize,
    wrong: &impl Fn(usize, String) -> Error,
) -> Result<Vec<RunOption>> {
    let option =
        |(key, value): (&toml::Spanned<std::borrow::Cow<'_, str>>, &toml::Spanned<DeValue<'_>>)| {
            let name = key.get_ref().to_string();
            let at = key.span().start;
            let refused = |kind: &str| {
                let problem =
                    format!("{name} is a string, a number, true or false, or a list, not {kind}");
                wrong(at, problem)
            };
            let value = match value.get_ref() {
                DeValue::Boolean(is_given) => OptionValue::Flag(*is_given),
                DeValue::Array(values) => {
                    let texts = values.iter().map(|value| {
                        text(value.get_ref()).ok_or_else(|| refused(value.get_ref().type_str()))
                    });
                    OptionValue::Texts(texts.collect::<Result<_>>()?)
                }
                value => {
                    OptionValue::Texts(vec![text(value).ok_or_else(|| refused(value.type_str()))?])
                }
            };
            Ok(RunOption { name, value, line: line(at) })
        };
    table.iter().map(option).collect()
}

/// Text of a string or a number.
fn text(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) if number.radix() == 10 => Some(number.as_str().to_owned()),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        _ => None,
    }
}
