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
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

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
    let option = |(key, value): (&Spanned<_>, &Spanned<_>)| {
        let name = DeString::to_string(key.get_ref());
        let at = key.span().start;
        let value = option_value(value.get_ref()).map_err(|kind| {
            let problem =
                format!("{name} is a string, a number, true or false, or a list, not {kind}");
            wrong(at, problem)
        })?;
        Ok(RunOption { name, value, line: line(at) })
    };
    table.iter().map(option).collect()
}

/// Value of an option. The error is the kind of a value that no option has.
fn option_value(value: &DeValue<'_>) -> Result<OptionValue, &'static str> {
    let text = |value: &DeValue<'_>| text(value).ok_or(value.type_str());
    match value {
        DeValue::Boolean(is_given) => Ok(OptionValue::Flag(*is_given)),
        DeValue::Array(values) => {
            let texts = values.iter().map(|value| text(value.get_ref()));
            Ok(OptionValue::Texts(texts.collect::<Result<_, _>>()?))
        }
        value => Ok(OptionValue::Texts(vec![text(value)?])),
    }
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
