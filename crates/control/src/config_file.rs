//! Config file: initial values of the knobs, and [options of a run](super::run_options).
//!
//! The format is TOML. In the table `knobs`, each key is a knob's name as on the command line, and
//! its value a string or a number, which is written to the knob as `echo` would. Knobs of one
//! device, queue or CPU may have a table of their own:
//!
//! ```toml
//! [knobs]
//! netdev_max_backlog = 300
//! rps_cpus = "3"
//!
//! [knobs.rx-0]
//! rps_cpus = "1"
//!
//! [knobs.eth1.rx-0]
//! rps_cpus = "2"
//! ```

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use forebay_engine::knobs::knob::Knob;
use forebay_sys as sys;
use forebay_sys::error::{Error, Result, quoted};
use forebay_sys::refused::Refused;
use forebay_sys::text_file::read_text;
use toml::de::{DeTable, DeValue};

use super::handle::Control;
use super::list::{ListedKnob, list};
use super::names::{self, Names, OfDevice};
use super::run_options::{self, RunOption};
use super::session::notes_on;

/// Maximum length of a config file, in bytes.
pub const CONFIG_BYTES_MAX: usize = 1 << 20;

/// Maximum nesting of TOML tables under `[knobs]`: device, then queue.
const TABLES_MAX: usize = 2;

/// A parsed config file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigFile {
    path: PathBuf,
    /// Entries in the order in which they are set.
    entries: Vec<ConfigEntry>,
    /// Options of the table `run`.
    run: Vec<RunOption>,
}

/// Effect of a config file that was read again.
#[derive(Debug)]
pub struct Reloaded {
    /// Knobs that changed, each with its value before and now.
    pub changed: Vec<String>,
    /// Parts of the file that are not in force as written.
    pub notes: Vec<String>,
    /// Refusals.
    pub errors: Vec<Error>,
    /// File with what was in force before in place of what was refused: compared with it, the next
    /// reading tries that again.
    pub in_force: ConfigFile,
}

impl Reloaded {
    fn of(file: ConfigFile) -> Self {
        Self { changed: Vec::new(), notes: Vec::new(), errors: Vec::new(), in_force: file }
    }

    fn refuse(&mut self, entry: &ConfigEntry, error: Error) {
        self.errors.push(error);
        self.in_force.entries.retain(|it| !it.is_same(entry));
    }

    /// Keeps an entry that was in force before, and still is.
    fn keep(&mut self, entry: &ConfigEntry) {
        let entries = &mut self.in_force.entries;
        if !entries.iter().any(|it| it.is_same(entry)) {
            entries.push(entry.clone());
            entries.sort_by_key(|it| turn(&it.name));
        }
    }
}

/// Value of one knob.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ConfigEntry {
    name: String,
    value: String,
    line: usize,
}

impl ConfigEntry {
    /// True if both give the same value to the same name, on whichever line.
    fn is_same(&self, other: &Self) -> bool {
        (&self.name, &self.value) == (&other.name, &other.value)
    }
}

impl ConfigFile {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// If the file cannot be read, is longer than [`CONFIG_BYTES_MAX`], or does not have the form above; with the line.
    pub fn read(path: &Path) -> Result<Self> {
        let text = read_text(path, CONFIG_BYTES_MAX).map_err(Error::file("read", path))?;
        Self::parse(path, &text)
    }

    /// Reads and parses a file anew.
    ///
    /// # Errors
    /// As [`read`](Self::read), and if it is a pipe or a device: its text is gone once read, and another
    /// may never come.
    pub fn read_again(path: &Path) -> Result<Self> {
        let kind = fs::metadata(path).map_err(Error::file("read", path))?.file_type();
        if !kind.is_file() && !kind.is_dir() {
            let why = "it is not a regular file, which alone can be read again";
            return Err(Error::file("read", path)(io::Error::new(ErrorKind::InvalidInput, why)));
        }
        Self::read(path)
    }

    fn parse(path: &Path, text: &str) -> Result<Self> {
        let line_of = lines_of(text);
        let wrong = |at: usize, problem: String| Error::Config {
            path: path.to_owned(),
            line: line_of(at),
            problem,
        };
        let root = DeTable::parse(text).map_err(|error| {
            wrong(error.span().map_or(0, |span| span.start), error.message().to_owned())
        })?;
        let (mut entries, mut run) = (Vec::new(), Vec::new());
        for (key, value) in root.get_ref() {
            match value.get_ref() {
                DeValue::Table(knobs) if key.get_ref() == "knobs" => {
                    gather(knobs, "", &mut entries, &wrong)?;
                }
                DeValue::Table(options) if key.get_ref() == "run" => {
                    run = run_options::read(options, &line_of, &wrong)?;
                }
                _ => {
                    let key_name = key.get_ref();
                    let problem =
                        format!("there are only the tables [run] and [knobs], not {key_name}");
                    return Err(wrong(key.span().start, problem));
                }
            }
        }
        entries.sort_by_key(|(at, entry)| (turn(&entry.name), *at));
        let entries =
            entries.into_iter().map(|(at, entry)| ConfigEntry { line: line_of(at), ..entry });
        Ok(Self { path: path.to_owned(), entries: entries.collect(), run })
    }

    /// Options of the table `run`, in the order of their names.
    #[must_use]
    pub fn run_options(&self) -> &[RunOption] {
        &self.run
    }

    /// Sets the knobs, except those in `except`: names of whole knobs, and paths of files. Returns a
    /// line for each part of the file that is not in force as written.
    ///
    /// # Errors
    /// If there is no such knob, or it refuses the value; with the line.
    pub fn apply(&self, control: &Control, except: &[String]) -> Result<Vec<String>> {
        let names = Names::in_run(control);
        let mut notes = Vec::new();
        for entry in self.entries_but(except) {
            notes.extend(self.set(control, &names, entry, |path| !except.contains(path))?);
        }
        notes.dedup();
        Ok(notes)
    }

    /// Sets the knobs that the file has otherwise than `before`, an earlier reading of it, and
    /// continues after an error. A knob that is no longer in the file gets its default. All others
    /// stay as they are, whoever set them, and so do those in `except`, as of [`apply`](Self::apply).
    pub fn apply_changes(&self, before: &Self, control: &Control, except: &[String]) -> Reloaded {
        let (old, names) = (list(control), Names::in_run(control));
        let mut reloaded = Reloaded::of(self.clone());
        let (was, wanted) = (before.by_path(control, except), self.by_path(control, except));
        for (path, entry) in was.iter().filter(|(path, _)| !wanted.contains_key(*path)) {
            let default = old.iter().find(|it| it.path == *path).map(|it| it.default.as_str());
            let default = default.filter(|default| !default.is_empty());
            let reset = default.map(|default| control.echo(path, default));
            let why = match reset {
                Some(Ok(_)) => continue,
                Some(Err(Refused { why, .. })) => {
                    reloaded.keep(entry);
                    format!(": its default is refused ({why})")
                }
                None => String::new(),
            };
            let name = &entry.name;
            reloaded.notes.push(format!("{name}: no longer in the file, and left as it is{why}"));
        }
        for entry in self.entries_but(except) {
            let is_new = |path: &String| {
                let value = was.get(path).map(|entry| &entry.value);
                wanted.get(path).is_some_and(|it| it.is_same(entry)) && value != Some(&entry.value)
            };
            match self.set(control, &names, entry, is_new) {
                Ok(notes) => reloaded.notes.extend(notes),
                Err(error) => {
                    reloaded.refuse(entry, error);
                    let refused =
                        wanted.iter().filter(|(path, it)| it.is_same(entry) && is_new(path));
                    for (path, _) in refused {
                        // Other queues may have taken the value.
                        restore(control, path, &old);
                        was.get(path).into_iter().for_each(|former| reloaded.keep(former));
                    }
                }
            }
        }
        // A knob of all may have changed what was set for one.
        for knob in old.iter().filter(|knob| except.contains(&knob.path)) {
            restore(control, &knob.path, &old);
            if !is_as_requested(control, knob) {
                let name = names.short(&knob.path);
                reloaded
                    .notes
                    .push(format!("{name}: set for itself, and the file's knobs exclude it"));
            }
        }
        reloaded.notes.dedup();
        for (old, new) in old.iter().zip(list(control)) {
            if old.path == new.path && old.value != new.value {
                let name = names.short(&old.path);
                reloaded.changed.push(format!("{name}: {} instead of {}", new.value, old.value));
            }
        }
        reloaded
    }

    /// Entry that decides each knob, by the knob's path: of several, the one with the most special
    /// name, which comes last.
    fn by_path(&self, control: &Control, except: &[String]) -> BTreeMap<String, &ConfigEntry> {
        let each = self.entries_but(except).flat_map(|entry| {
            let paths = names::find_for_writing(control, &entry.name).unwrap_or_default();
            paths.into_iter().map(move |path| (path, entry))
        });
        each.filter(|(path, _)| !except.contains(path)).collect()
    }

    /// Entries of knobs that are not in `except` as a whole.
    fn entries_but(&self, except: &[String]) -> impl Iterator<Item = &ConfigEntry> {
        let is_whole = |entry: &ConfigEntry| except.iter().any(|name| name == last(&entry.name));
        self.entries.iter().filter(move |entry| !is_whole(entry))
    }

    /// Sets one knob, or that of every queue, where `is_meant` for its path. Returns lines about
    /// parts that are not in force.
    fn set(
        &self,
        control: &Control,
        names: &Names,
        entry: &ConfigEntry,
        is_meant: impl Fn(&String) -> bool,
    ) -> Result<Vec<String>> {
        let ConfigEntry { name, value, line } = entry;
        let wrong = |Refused { errno, why }: Refused| Error::Config {
            path: self.path.clone(),
            line: *line,
            problem: format!("{name} cannot be {}: {why} ({errno})", quoted(value)),
        };
        let mut notes = Vec::new();
        let paths = names::find_for_writing(control, name).map_err(wrong)?;
        for path in paths.into_iter().filter(is_meant) {
            let written = control.echo(&path, value);
            let written = written.map_err(wrong)?;
            let name = names.short(&path);
            let of_knob = notes_on(control, &written).into_iter();
            notes.extend(of_knob.map(|note| format!("{name}: {note}")));
        }
        Ok(notes)
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Sets a knob to the value that was requested for it, if another one is now.
fn restore(control: &Control, path: &str, knobs: &[ListedKnob]) {
    let Some(before) = knobs.iter().find(|knob| knob.path == path) else { return };
    if !is_as_requested(control, before) {
        // Ignored: what the knob had before, it took.
        let _ = control.echo(path, &before.requested);
    }
}

/// True if the same is requested for the knob now, or it cannot be read.
fn is_as_requested(control: &Control, before: &ListedKnob) -> bool {
    let now = control.tree().file(&before.path).and_then(|file| control.requested(file));
    now.map_or(true, |now| now.trim_end() == before.requested)
}

/// Adds the values of a table, each with its offset in the text. `above` is the prefix for the
/// table's device, queue or CPU, as in `rx-0/`.
fn gather(
    table: &DeTable<'_>,
    above: &str,
    entries: &mut Vec<(usize, ConfigEntry)>,
    wrong: &impl Fn(usize, String) -> Error,
) -> Result<()> {
    for (key, value) in table {
        let name = format!("{above}{}", key.get_ref());
        let at = key.span().start;
        let value = match value.get_ref() {
            DeValue::Table(table) if levels(above) < TABLES_MAX => {
                gather(table, &format!("{name}/"), entries, wrong)?;
                continue;
            }
            DeValue::String(text) => text.to_string(),
            DeValue::Integer(number) => {
                let radix = match number.radix() {
                    16 => "0x",
                    8 => "0o",
                    2 => "0b",
                    _ => "",
                };
                format!("{radix}{}", number.as_str())
            }
            other => {
                let problem = format!("{name} is a string or a number, not {}", other.type_str());
                return Err(wrong(at, problem));
            }
        };
        entries.push((at, ConfigEntry { name, value, line: 0 }));
    }
    Ok(())
}

/// Order in which knobs are set: those for all devices and queues before those for one, and before
/// all others the length of the tables that `flow_limit_cpu_bitmap` makes.
fn turn(name: &str) -> (bool, usize) {
    (last(name) != Knob::FlowLimitTableLen.name(), levels(name))
}

/// Number of names in front of a knob's.
fn levels(name: &str) -> usize {
    name.matches('/').count()
}

/// Writes the knobs that differ from their defaults to a file, as they were requested, and no others. Random values are
/// left out, since they are secret, and so is each CPU's `online`, since `cpus` has it. A file that
/// is replaced keeps its owner, group and mode, and a link to it stays.
///
/// # Errors
/// If there is something else than a config file, or the file cannot be written. It is then
/// unchanged.
pub fn save(path: &Path, knobs: &[ListedKnob]) -> Result<()> {
    let (path, old) = replaced(path)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    let [one, other, ..] = sys::random_key();
    name.push(format!(".{}-{one:02x}{other:02x}.new", std::process::id()));
    let new = path.with_file_name(name);
    let run = if old.is_some() { saved_run(&path)? } else { None };
    // Created exclusively: a file or link that somebody put there is not written to or followed.
    let written = fs::File::create_new(&new).and_then(|mut file| {
        if let Some(old) = &old {
            give_to_owner_of(old, &file)?;
            file.set_permissions(old.permissions())?;
        }
        file.write_all(render(knobs, run.as_ref()).as_bytes())?;
        file.sync_all()?;
        fs::rename(&new, &path)
    });
    written.map_err(|error| {
        // The new file was not created, or is incomplete.
        let _ = fs::remove_file(&new);
        Error::file("write", path)(error)
    })
}

/// Path of the file behind all links, and its metadata if it exists.
fn replaced(path: &Path) -> Result<(PathBuf, Option<Metadata>)> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok((path.to_owned(), None)),
        found => found.map_err(Error::file("write", path))?,
    };
    let real = path.canonicalize().map_err(Error::file("write", path))?;
    let old = real.metadata().map_err(Error::file("write", &real))?;
    if !old.is_file() {
        // A device or pipe would be replaced by a file.
        let why = io::Error::new(ErrorKind::InvalidInput, "it is not a regular file");
        return Err(Error::file("write", real)(why));
    }
    Ok((real, Some(old)))
}

/// Gives a new file to the owner and group of the file that it replaces: a run of that user reads
/// it again.
fn give_to_owner_of(old: &Metadata, file: &fs::File) -> io::Result<()> {
    let new = file.metadata()?;
    if (new.uid(), new.gid()) == (old.uid(), old.gid()) {
        return Ok(());
    }
    fchown(file, Some(old.uid()), Some(old.gid())).map_err(|error| {
        let owner = format!("it cannot stay user {}'s and group {}'s", old.uid(), old.gid());
        io::Error::new(error.kind(), format!("{owner}: {error}"))
    })
}

/// Table `run` of the file that is about to be replaced.
fn saved_run(path: &Path) -> Result<Option<toml::Value>> {
    let text = read_text(path, CONFIG_BYTES_MAX).map_err(Error::file("read", path))?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    let lost = |line, problem: &str| Error::Config {
        path: path.to_owned(),
        line,
        problem: format!("it is not a config file, and would be lost: {problem}"),
    };
    ConfigFile::parse(path, &text).map_err(|error| match error {
        Error::Config { line, problem, .. } => lost(line, &problem),
        error => error,
    })?;
    let file = text.parse::<toml::Table>().map_err(|error| {
        lost(lines_of(&text)(error.span().map_or(0, |span| span.start)), error.message())
    })?;
    Ok(file.get("run").cloned())
}

fn render(knobs: &[ListedKnob], run: Option<&toml::Value>) -> String {
    let paths: Vec<_> = knobs.iter().map(|knob| &knob.path).collect();
    let names = Names::of(&paths);
    let mut table = toml::Table::new();
    for ListedKnob { path, requested: value, default, .. } in knobs {
        if value == default || default.is_empty() || last(path) == "online" {
            continue;
        }
        let name =
            if is_same_everywhere(path, knobs) { last(path).into() } else { names.short(path) };
        insert(&mut table, &name, toml_value(last(path), value));
    }
    let mut root = toml::Table::new();
    root.extend(run.map(|run| ("run".to_owned(), run.clone())));
    root.insert("knobs".to_owned(), toml::Value::Table(table));
    format!("# Written by `forebay set --save`: the knobs that are not at their defaults.\n{root}")
}

/// Inserts a value into the tables that its name has, as in `rx-0/rps_cpus`.
fn insert(table: &mut toml::Table, name: &str, value: toml::Value) {
    match name.split_once('/') {
        None => drop(table.insert(name.to_owned(), value)),
        Some((above, below)) => {
            let empty = || toml::Value::Table(toml::Table::new());
            let above = table.entry(above).or_insert_with(empty);
            if let Some(above) = above.as_table_mut() {
                insert(above, below, value);
            }
        }
    }
}

/// True if all devices and queues have the same value, which then fits a run with any number of
/// them.
fn is_same_everywhere(path: &str, knobs: &[ListedKnob]) -> bool {
    let is_of_device = |path: &str| OfDevice::of(path).is_some();
    let of_devices = knobs.iter().filter(|knob| is_of_device(&knob.path));
    let mut values =
        of_devices.filter(|knob| last(&knob.path) == last(path)).map(|knob| &knob.requested);
    let first = values.next();
    is_of_device(path) && values.all(|value| Some(value) == first)
}

/// TOML value: a number if the text is one. A mask is a string, since it may have leading zeros.
fn toml_value(name: &str, value: &str) -> toml::Value {
    let is_mask = Knob::named(name).is_some_and(Knob::is_mask);
    let number = value.parse::<i64>().ok();
    let number = number.filter(|number| !is_mask && number.to_string() == value);
    number.map_or_else(|| toml::Value::String(value.to_owned()), toml::Value::Integer)
}

fn last(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, last)| last)
}

/// Line of each offset in a text, from 1 on.
fn lines_of(text: &str) -> impl Fn(usize) -> usize + use<> {
    let ends: Vec<_> = text.match_indices('\n').map(|(at, _)| at).collect();
    move |at| 1 + ends.partition_point(|end| *end < at)
}

#[cfg(test)]
mod tests;
