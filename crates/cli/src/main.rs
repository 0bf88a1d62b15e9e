//! The `forebay` program: run live devices or replay captures through the receive path, control
//! such a run, simulate it on virtual CPUs, advise on masks, compute hashes, measure stages,
//! compare with other programs.
#![forbid(unsafe_code)]

mod args; //      the command line
mod synthetic; // synthetic traffic, as the command line describes it
mod bench; //     forebay bench
mod compare; //   forebay compare
mod hash; //      forebay hash
mod run; //       forebay run
mod exec; //      forebay exec
mod replay; //    forebay replay
mod sim; //       forebay sim
mod control; //   forebay get, set, list, watch, explain
mod top; //       forebay top
mod options; //   options shared by several commands
mod signals; //   signals that end a run early
mod ticker; //    periodic tasks beside a run
mod records; //   warnings of records that a capture's reader passed over
mod script; //    scripted changes, from a file
mod advise; //    forebay advise
mod doctor; //    forebay doctor
#[cfg(feature = "generate")]
mod generate; //  forebay generate
mod service; //   notices to a service manager
mod plot; //      pictures of a run
mod result_file; // files that stay as they are until there is a result
mod table; //     the final report of a run, for people
mod output; //    standard output
mod log; //       messages of the program: levels, forms, a limit
mod failure; //   error messages, and the exit code

use std::process::ExitCode;

use args::Command;

fn main() -> ExitCode {
    signals::survive_file_size_limit();
    let typed: Vec<_> = std::env::args_os().collect();
    let prints_json = typed.iter().any(|word| word == "--json");
    let cli = match run::parse(&typed) {
        Ok(cli) => cli,
        Err(failure) => return failure::exit(Err(failure), prints_json),
    };
    if let Err(failure) = log::begin(&cli.command.log()) {
        return failure::exit(Err(failure), prints_json);
    }
    let result = match &cli.command {
        Command::Run(args) => run::run(args),
        Command::Exec(args) => exec::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Sim(args) => sim::run(args),
        Command::Get(args) => control::get(args),
        Command::Set(args) => control::set(args),
        Command::List(args) => control::list(args),
        Command::Watch(args) => control::watch(args),
        Command::Explain(args) => control::explain(args),
        Command::Top(args) => top::run(args),
        Command::Advise(args) => advise::run(args),
        Command::Doctor(args) => match doctor::run(args) {
            Ok(code) => return code,
            Err(failure) => Err(failure),
        },
        #[cfg(feature = "generate")]
        Command::Generate(args) => generate::run(args),
        Command::Hash(args) => hash::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Compare(args) => compare::run(args),
        Command::CompareOwn(args) => compare::own::run(args),
        Command::RemoveSocket(args) => options::remover::run(args),
    };
    failure::exit(result, cli.command.prints_json())
}
