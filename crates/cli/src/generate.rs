//! `forebay generate`: man pages and completions, for packages. It is part of a build with the
//! feature `generate` only, so that other builds need nothing for it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory, ValueEnum};
use clap_complete::Shell;
use forebay_sys::Error;

use crate::args::Cli;
use crate::failure::Failure;

#[derive(Debug, Args)]
pub(crate) struct GenerateArgs {
    /// What is written
    kind: GeneratedKind,

    /// Where to
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Kind of files that are generated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum GeneratedKind {
    /// Man pages, one for each command
    Man,
    /// Completions, one file for each shell
    Completions,
}

/// Writes the files, and creates the directory if necessary.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let directory = args.directory.as_path();
    fs::create_dir_all(directory).map_err(Error::file("create", directory))?;
    let written = match args.kind {
        GeneratedKind::Man => clap_mangen::generate_to(Cli::command(), directory),
        GeneratedKind::Completions => completions(directory),
    };
    Ok(written.map_err(Error::file("write", directory))?)
}

fn completions(directory: &Path) -> io::Result<()> {
    let mut command = Cli::command();
    Shell::value_variants().iter().try_for_each(|shell| {
        clap_complete::generate_to(*shell, &mut command, "forebay", directory).map(drop)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ins_1_every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        for kind in [GeneratedKind::Man, GeneratedKind::Completions] {
            run(&GenerateArgs { kind, directory: dir.path().join("new") }).unwrap();
        }
        let read = |name: &str| fs::read_to_string(dir.path().join("new").join(name)).unwrap();
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let page = read(&format!("forebay-{}.1", command.get_name()));
            assert!(page.starts_with(".ie") && page.contains(".SH SYNOPSIS"), "{page:.80}");
        }
        assert!(read("forebay.1").contains("forebay\\-run(1)"));
        for (file, part) in
            [("forebay.bash", "--via"), ("_forebay", "#compdef forebay"), ("forebay.fish", "via")]
        {
            assert!(read(file).contains(part), "{file}");
        }
    }
}
