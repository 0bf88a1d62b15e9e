//! `forebay top` in tmux, as a person uses it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use forebay_control::ControlClient;
use tempfile::TempDir;

use crate::Judgement;
use crate::order::one_cpu;

/// Name and function of a judge.
type TopJudge = (&'static str, fn() -> Judgement);

/// All judges.
pub(crate) const TRIALS: [TopJudge; 4] = [
    ("top_4_screen_says_what_explain_says", judge_flow),
    ("top_5_every_end_restores_the_terminal", judge_ends),
    ("top_5_lost_terminal_ends_it", judge_lost_terminal),
    ("top_2_colours_are_there_if_wanted", judge_colours),
];

const PROGRAM: &str = env!("CARGO_BIN_EXE_forebay");

/// The first flow of the bundled capture.
const FLOW: &str = "10.9.0.2:39796 > 10.9.0.1:53";

/// Time after which a screen counts as hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval between two looks at a screen.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// Time after which the terminal has drawn all that the program wrote.
const DRAWING: Duration = Duration::from_secs(1);

/// Tool that is missing, if it is.
pub(crate) fn missing() -> Option<String> {
    let found = Command::new("tmux").arg("-V").output();
    found.err().map(|error| format!("there is no tmux: {error}")).or_else(one_cpu)
}

/// A flow is followed while it moves; a knob is set, and drops begin. The screen has the lines of
/// `explain` at all times.
fn judge_flow() -> Judgement {
    let run = Run::start("--rps 1")?;
    let screen = Screen::start(&run, &format!("--no-color --follow '{FLOW}'"))?;
    screen.wait_for("on CPU 0: its last packet went there")?;
    screen.keys(&["=", "rps_cpus=2", "Enter"])?;
    screen.wait_for("now rx-0/rps_cpus 2")?;
    screen.wait_for("now:   on CPU 1: its last packet went there")?;
    let explained = run.ask(&format!("explain {FLOW}"))?;
    let moved = explained.iter().find(|line| line.contains(": CPU 0 to CPU 1"));
    let moved = moved.ok_or_else(|| format!("no move: {explained:?}"))?;
    let begin: String = moved.chars().take(60).collect();
    screen.wait_until(&begin, |text| {
        text.contains(&begin)
            && (text.contains("moves: the latest of 1") || text.contains("moves: 1 recorded"))
    })?;
    screen.keys(&["=", "netdev_max_backlog=x", "Enter"])?;
    screen.wait_for("netdev_max_backlog cannot be \"x\"")?;
    screen.keys(&["Escape", "Escape", "F", "=", "netdev_max_backlog=1", "Enter"])?;
    screen.wait_until("drops instead of the flow", |text| {
        text.contains("backlog_full") && !text.contains("following")
    })?;
    screen.keys(&["/", "flow_limit", "Enter"])?;
    screen.wait_until("rows with flow_limit only", |text| {
        text.contains("rows with \"flow_limit\" only") && !text.contains("backlog_full")
    })?;
    screen.keys(&["p"])?;
    screen.wait_for("[paused]")?;
    thread::sleep(DRAWING);
    let stopped = screen.text()?;
    thread::sleep(Duration::from_millis(500));
    if screen.text()? != stopped {
        return Err(format!("the display goes on:\n{stopped}{}", screen.text()?).into());
    }
    screen.keys(&["p", "q"])?;
    screen.code()?;
    Ok(())
}

/// The terminal is as before after a key, each signal, and the end of the run.
fn judge_ends() -> Judgement {
    for (end, shown) in [
        ("q", ""),
        ("C-c", ""),
        ("TERM", ""),
        ("HUP", ""),
        ("end of run", "forebay: the run has ended"),
        ("killed run", "forebay: the run has ended"),
    ] {
        let mut run = Run::start("")?;
        let screen = Screen::start(&run, "")?;
        screen.wait_for(">CPU")?;
        match end {
            "q" | "C-c" => screen.keys(&[end])?,
            "TERM" | "HUP" => signal(end, screen.read("pid")?.trim())?,
            "end of run" => signal("TERM", &run.child.id().to_string())?,
            _ => run.child.kill()?,
        }
        let code = screen.code()?;
        let settings = [screen.read("before")?, screen.read("after")?];
        if code.trim() != "0" || settings[0] != settings[1] {
            return Err(format!("{end}: {code} {settings:?}\n{}", screen.text()?).into());
        }
        screen.wait_until(&format!("{shown:?} after {end}"), |text| {
            text.contains("as it was") && text.contains(shown) && !text.contains(">CPU")
        })?;
        let state = screen.tmux(&["display", "-p", "#{alternate_on} #{cursor_flag}"])?;
        if state.trim() != "0 1" {
            return Err(format!("{end}: {state}\n{}", screen.text()?).into());
        }
    }
    Ok(())
}

/// The terminal's emulator is killed: nobody is left to see the program, and it ends.
fn judge_lost_terminal() -> Judgement {
    let run = Run::start("")?;
    let screen = Screen::start(&run, "")?;
    screen.wait_for(">CPU")?;
    let pid = screen.read("pid")?;
    signal("KILL", screen.tmux(&["display", "-p", "#{pid}"])?.trim())?;
    let process = PathBuf::from("/proc").join(pid.trim());
    Ok(wait_until("the program ends", || Ok((!process.exists()).then_some(())))?)
}

fn judge_colours() -> Judgement {
    let run = Run::start("")?;
    for (args, is_coloured) in [("", true), ("--no-color", false)] {
        let screen = Screen::start(&run, args)?;
        screen.wait_for(">CPU")?;
        let text = screen.tmux(&["capture-pane", "-p", "-e"])?;
        // A foreground colour, as tmux writes it.
        let has_colour = text.contains("[38;5;");
        if has_colour != is_coloured {
            return Err(format!("{args:?}: coloured: {has_colour}\n{text:?}").into());
        }
    }
    Ok(())
}

fn signal(name: &str, pid: &str) -> Judgement {
    let sent = Command::new("kill").args([&format!("-{name}"), pid]).status()?;
    if sent.success() { Ok(()) } else { Err(format!("kill -{name} {pid}: {sent}").into()) }
}

/// A replay that listens at `s.sock`, until dropped.
struct Run {
    child: Child,
    directory: TempDir,
}

impl Run {
    fn start(args: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let directory = tempfile::tempdir()?;
        let fixed = "replay --cpus 2 --spread always --rate 50k --loops 1000000 --work 2000 \
                     --when-full drop --control s.sock";
        let mut run = Command::new(PROGRAM);
        run.args(fixed.split_whitespace()).args(args.split_whitespace()).current_dir(&directory);
        let child = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        let run = Self { child, directory };
        wait_until("the run listens", || Ok(run.ask("get mtu").ok()))?;
        Ok(run)
    }

    fn ask(&self, request: &str) -> Result<Vec<String>, Box<dyn std::error::Error>> {
        Ok(ControlClient::connect(&self.directory.path().join("s.sock"))?.ask(request)?)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A terminal of 80 columns and 24 lines with the program, in a tmux of its own, until dropped.
pub(crate) struct Screen {
    directory: TempDir,
}

impl Screen {
    fn start(run: &Run, args: &str) -> Result<Self, Box<dyn std::error::Error>> {
        Self::of(&run.directory.path().join("s.sock"), args)
    }

    /// The view of the run that listens at `socket`.
    pub(crate) fn of(socket: &Path, args: &str) -> Result<Self, Box<dyn std::error::Error>> {
        let screen = Self { directory: tempfile::tempdir()? };
        let top = format!("{PROGRAM} top --control {} --interval 0.2 {args}", socket.display());
        let script = format!(
            "cd {}; echo as it was; stty -g >before; sh -c 'echo $$ >pid; exec \"$@\"' sh {top}; \
             code=$?; stty -g >after; echo $code >code; exec sleep 600",
            screen.directory.path().display()
        );
        screen.tmux(&["new-session", "-d", "-x", "80", "-y", "24", &script])?;
        Ok(screen)
    }

    fn tmux(&self, args: &[&str]) -> Result<String, Box<dyn std::error::Error>> {
        let mut tmux = Command::new("tmux");
        tmux.arg("-S").arg(self.path("tmux.sock")).args(["-f", "/dev/null"]).args(args);
        let output = tmux.env_remove("TMUX").env_remove("NO_COLOR").output()?;
        if !output.status.success() {
            return Err(format!("{tmux:?}: {output:?}").into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn read(&self, name: &str) -> Result<String, Box<dyn std::error::Error>> {
        Ok(fs::read_to_string(self.path(name))?)
    }

    pub(crate) fn keys(&self, keys: &[&str]) -> Judgement {
        for key in keys {
            self.tmux(&["send-keys", key])?;
            // Keys right behind an escape would be taken for its sequence.
            if *key == "Escape" {
                thread::sleep(LOOK_PERIOD);
            }
        }
        Ok(())
    }

    pub(crate) fn text(&self) -> Result<String, Box<dyn std::error::Error>> {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until the screen contains `part`. The terminal may be half drawn by then, so whatever else
    /// is expected needs a wait of its own.
    pub(crate) fn wait_for(&self, part: &str) -> Judgement {
        self.wait_until(part, |text| text.contains(part))
    }

    /// Waits until `is_shown` is true for the screen's text.
    pub(crate) fn wait_until(&self, what: &str, is_shown: impl Fn(&str) -> bool) -> Judgement {
        let mut last = String::new();
        let found = wait_until(what, || {
            last = self.text()?;
            Ok(is_shown(&last).then_some(()))
        });
        found.map_err(|error| format!("{error}; the screen is\n{last}").into())
    }

    /// Exit code of the program, as soon as it has ended.
    fn code(&self) -> Result<String, Box<dyn std::error::Error>> {
        wait_until("the program ends", || {
            Ok(self.read("code").ok().filter(|code| code.ends_with('\n')))
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

fn wait_until<T>(
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>, Box<dyn std::error::Error>>,
) -> Result<T, Box<dyn std::error::Error>> {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        if let Some(found) = look()? {
            return Ok(found);
        }
        thread::sleep(LOOK_PERIOD);
    }
    Err(format!("{what:?} has not come true").into())
}
