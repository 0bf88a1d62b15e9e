//! Sources of the peers, and their compilation.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// Program of a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Peer {
    /// Sender of the flood; it is nobody's peer.
    Flood,
    /// UDP socket of the kernel.
    Udp,
    /// AF_PACKET.
    Packet,
    /// AF_XDP by libxdp.
    Xsk,
    /// XDP cpumap.
    Cpumap,
    /// `rte_ring`.
    DpdkRing,
    /// `rte_thash`.
    DpdkToeplitz,
    /// `rte_gro`.
    DpdkGro,
    /// `rte_net_get_ptype`.
    DpdkParse,
    /// `rte_mempool`.
    DpdkPool,
}

/// Files that are written for every compilation.
const HEADERS: [(&str, &str); 3] = [
    ("peer.h", include_str!("../../bench/peers/peer.h")),
    ("bpf.h", include_str!("../../bench/peers/bpf.h")),
    ("dpdk.h", include_str!("../../bench/peers/dpdk/dpdk.h")),
];

/// Package of DPDK's headers and libraries, by the name that pkg-config knows.
const DPDK: &str = "libdpdk";

impl Peer {
    fn name(self) -> &'static str {
        match self {
            Self::Flood => "flood",
            Self::Udp => "udp",
            Self::Packet => "packet",
            Self::Xsk => "xsk",
            Self::Cpumap => "cpumap",
            Self::DpdkRing => "dpdk_ring",
            Self::DpdkToeplitz => "dpdk_toeplitz",
            Self::DpdkGro => "dpdk_gro",
            Self::DpdkParse => "dpdk_parse",
            Self::DpdkPool => "dpdk_pool",
        }
    }

    fn source(self) -> &'static str {
        match self {
            Self::Flood => include_str!("../../bench/peers/flood.c"),
            Self::Udp => include_str!("../../bench/peers/udp.c"),
            Self::Packet => include_str!("../../bench/peers/packet.c"),
            Self::Xsk => include_str!("../../bench/peers/xsk.c"),
            Self::Cpumap => include_str!("../../bench/peers/cpumap.c"),
            Self::DpdkRing => include_str!("../../bench/peers/dpdk/ring.c"),
            Self::DpdkToeplitz => include_str!("../../bench/peers/dpdk/toeplitz.c"),
            Self::DpdkGro => include_str!("../../bench/peers/dpdk/gro.c"),
            Self::DpdkParse => include_str!("../../bench/peers/dpdk/parse.c"),
            Self::DpdkPool => include_str!("../../bench/peers/dpdk/pool.c"),
        }
    }

    fn libraries(self) -> &'static [&'static str] {
        if self == Self::Xsk { &["-lxdp", "-lbpf"] } else { &[] }
    }

    fn is_dpdk(self) -> bool {
        self.name().starts_with("dpdk")
    }

    /// Packages (Debian's names) without which the peer cannot be compiled.
    fn packages(self) -> &'static str {
        match self {
            Self::Xsk => "libxdp-dev libbpf-dev",
            _ if self.is_dpdk() => "libdpdk-dev pkg-config",
            _ => "libc6-dev linux-libc-dev",
        }
    }
}

/// Compiled peers, in a directory that only this process uses.
pub(super) struct Peers {
    directory: TempDir,
    compiler: String,
}

impl Peers {
    pub(super) fn new() -> Result<Self, String> {
        let directory =
            TempDir::with_prefix("forebay-peers-").map_err(|error| error.to_string())?;
        for (name, text) in HEADERS {
            fs::write(directory.path().join(name), text).map_err(|error| error.to_string())?;
        }
        Ok(Self { directory, compiler: std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()) })
    }

    /// Path of a further file in the directory.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The compiled program. An error names what to install.
    pub(super) fn program(&self, peer: Peer) -> Result<PathBuf, String> {
        let program = self.directory.path().join(peer.name());
        if program.exists() {
            return Ok(program);
        }
        if !is_installed(&self.compiler) {
            return Err(format!("no C compiler ({}): install gcc", self.compiler));
        }
        let packages = peer.packages();
        let flags = if peer.is_dpdk() { dpdk_flags(packages)? } else { Vec::new() };
        let source = program.with_extension("c");
        fs::write(&source, peer.source()).map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.compiler);
        command.args(["-O3", "-march=native", "-std=gnu11", "-w", "-pthread", "-o"]);
        command.arg(&program).arg(&source).args(peer.libraries()).args(flags).arg("-lm");
        let output = command.output().map_err(|error| format!("{}: {error}", self.compiler))?;
        if output.status.success() {
            return Ok(program);
        }
        Err(not_compiled(&String::from_utf8_lossy(&output.stderr), packages))
    }
}

fn dpdk_flags(packages: &str) -> Result<Vec<String>, String> {
    let asked = Command::new("pkg-config").args(["--cflags", "--libs", DPDK]).output();
    match asked {
        Ok(output) if output.status.success() => {
            let flags = String::from_utf8_lossy(&output.stdout).into_owned();
            Ok(for_this_cpu(&flags).map(str::to_owned).collect())
        }
        Ok(_) | Err(_) => Err(format!("DPDK is not installed: install {packages}")),
    }
}

/// Flags without the processor that the distribution has built DPDK for: of two, the compiler takes the last one.
fn for_this_cpu(flags: &str) -> impl Iterator<Item = &str> {
    flags.split_whitespace().filter(|flag| !flag.starts_with("-march="))
}

/// Reason why a peer was not compiled: the compiler's first error with its place, and the packages that it needs.
fn not_compiled(told: &str, packages: &str) -> String {
    let error = told.lines().find(|line| line.contains("error")).unwrap_or("the compiler failed");
    format!("not compiled ({}): check that {packages} are installed", error.trim())
}

/// True if a tool can be started by its name.
pub(super) fn is_installed(tool: &str) -> bool {
    let shell =
        Command::new("sh").args(["-c", "command -v \"$0\"", tool]).stdout(Stdio::null()).status();
    shell.is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cmp_2_dpdk_is_built_for_this_cpu() {
        let flags = "-I/usr/include/dpdk -include rte_config.h -march=corei7 \n";
        let kept: Vec<_> = for_this_cpu(flags).collect();
        assert_eq!(kept, ["-I/usr/include/dpdk", "-include", "rte_config.h"]);
    }

    #[test]
    fn cmp_2_missing_compiler_and_headers_are_named() {
        let mut peers = Peers::new().unwrap();
        peers.compiler = "no-such-compiler".to_owned();
        let reason = peers.program(Peer::Udp).unwrap_err();
        assert_eq!(reason, "no C compiler (no-such-compiler): install gcc");
        let told = "xsk.c:5:10: fatal error: xdp/xsk.h: No such file or directory\n    5 | #inc";
        let named = "not compiled (xsk.c:5:10: fatal error: xdp/xsk.h: No such file or directory): check that libxdp-dev \
             libbpf-dev are installed";
        assert_eq!(not_compiled(told, Peer::Xsk.packages()), named);
    }
}
