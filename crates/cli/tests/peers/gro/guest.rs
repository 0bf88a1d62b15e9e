//! A virtual machine with Debian's kernel, which has the tunnel modules that the machine's own may
//! lack. `.ci/run` unpacks the kernel's package under `target/guest`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use forebay_testkit::namespaces::named::{output_of, run};
use forebay_testkit::programs::write_script;
use libtest_mimic::Failed;

/// Programs of the guest, copied from here with their libraries.
const PROGRAMS: [&str; 3] = ["ip", "ethtool", "tcpdump"];

/// Drivers and tunnels; `depmod` finds what these need.
const MODULES: [&str; 11] = [
    "virtio_pci",
    "virtio_net",
    "ip_gre",
    "ip6_gre",
    "vxlan",
    "geneve",
    "ipip",
    "sit",
    "ip6_tunnel",
    "8021q",
    "virtio_console",
];

/// Everything that the guest runs. tcpdump's file goes out by a virtio port.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devtmpfs devtmpfs /dev
for module in MODULES; do modprobe $module; done
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
ip link add vxlan0 type vxlan external dstport 4789 && ip link set vxlan0 up
ip link add geneve0 type geneve external dstport 6081 && ip link set geneve0 up
echo 3000000 >/sys/class/net/eth0/gro_flush_timeout
echo 10 >/sys/class/net/eth0/napi_defer_hard_irqs
ethtool -K eth0 gro on rx-udp-gro-forwarding on
ip link set eth0 mtu 16000 up promisc on
tcpdump -Z root -i eth0 -Q in -s 70000 -B 16384 --immediate-mode -U -w - >/dev/vport0p1
poweroff -f
"#;

/// Reason why there can be no guest.
pub(crate) fn missing() -> Option<String> {
    let is_there = |tool: &str| {
        let mut command = Command::new(tool);
        command.arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null());
        command.status().is_ok()
    };
    let tools = ["qemu-system-x86_64", "busybox", "cpio", "ldd"];
    if let Some(tool) = tools.into_iter().chain(PROGRAMS).find(|tool| !is_there(tool)) {
        return Some(format!("{tool} is not installed, for a guest with Debian's kernel"));
    }
    let path = unpacked();
    let is_unpacked = kernel_of(&path).is_some();
    (!is_unpacked).then(|| format!("Debian's kernel is not unpacked in {}", path.display()))
}

/// Files that a guest boots from.
pub(crate) struct Guest {
    directory: tempfile::TempDir,
    kernel: PathBuf,
}

impl Guest {
    /// Packs an initial file system.
    pub(super) fn new() -> Result<Self, Failed> {
        let kernel = kernel_of(&unpacked()).ok_or("there is no kernel")?;
        let directory = tempfile::tempdir()?;
        let root = directory.path().join("root");
        for path in ["bin", "sbin", "etc", "proc", "sys", "dev", "tmp", "run"] {
            fs::create_dir_all(root.join(path))?;
        }
        let busybox = output_of("sh", &["-c", "command -v busybox"])?;
        fs::copy(busybox.trim(), root.join("bin/busybox"))?;
        for program in PROGRAMS {
            copy_program(program, &root)?;
        }
        copy_modules(&root)?;
        // tcpdump asks who root is.
        fs::write(root.join("etc/passwd"), "root:x:0:0:root:/:/bin/sh\n")?;
        write_script(&root.join("init"), &INIT.replace("MODULES", &MODULES.join(" ")))?;
        let pack = format!(
            "cd '{}' && find . | cpio -o -H newc --quiet | gzip -1 >../initrd",
            root.display()
        );
        run("sh", &["-c", &pack])?;
        Ok(Self { directory, kernel })
    }

    /// A guest whose one network device is a TAP of this name, and whose standard output is a capture
    /// of what came out of its GRO. No KVM: nested, it does not run everywhere.
    pub(super) fn boot(&self, tap: &str) -> Vec<String> {
        let initrd = self.directory.path().join("initrd").display().to_string();
        let net = format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost=off");
        let device = "virtio-net-pci,netdev=net,guest_tso4=off,guest_tso6=off,guest_csum=off";
        [
            &["qemu-system-x86_64", "-accel", "tcg", "-cpu", "qemu64", "-m", "512", "-nodefaults"]
                [..],
            &["-no-reboot", "-display", "none", "-chardev", "file,id=out,path=/dev/stdout"],
            &["-device", "virtio-serial-pci", "-device", "virtserialport,chardev=out"],
            &["-kernel", &self.kernel.display().to_string(), "-initrd", &initrd],
            &["-append", "quiet panic=-1", "-netdev", &net, "-device", device],
        ]
        .concat()
        .into_iter()
        .map(str::to_owned)
        .collect()
    }
}

fn unpacked() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/guest")
}

fn kernel_of(unpacked: &Path) -> Option<PathBuf> {
    let mut files = fs::read_dir(unpacked.join("boot")).ok()?.flatten();
    files.find(|file| file.file_name().to_string_lossy().starts_with("vmlinuz")).map(|it| it.path())
}

fn copy_program(program: &str, root: &Path) -> Result<(), Failed> {
    let path =
        output_of("sh", &["-c", &format!("PATH=$PATH:/sbin:/usr/sbin command -v {program}")])?;
    fs::copy(path.trim(), root.join("sbin").join(program))?;
    let libraries = output_of("ldd", &[path.trim()])?;
    for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(library.trim_start_matches('/'));
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::copy(library, to)?;
    }
    Ok(())
}

/// Copies modules that the tunnels and the device need, and makes the table that modprobe reads.
fn copy_modules(root: &Path) -> Result<(), Failed> {
    let versions = unpacked().join("lib/modules");
    let version = fs::read_dir(&versions)?.flatten().next().ok_or("there are no modules")?;
    let name = version.file_name().to_string_lossy().into_owned();
    let unpacked = unpacked().display().to_string();
    run("busybox", &["depmod", "-b", &unpacked, &name])?;
    let needed = fs::read_to_string(version.path().join("modules.dep"))?;
    let to = root.join("lib/modules").join(&name);
    let is_wanted = |path: &str| {
        let stem = Path::new(path).file_stem().unwrap_or_default().to_string_lossy();
        MODULES.contains(&stem.as_ref())
    };
    let lines = needed.lines().filter_map(|line| line.split_once(':'));
    for (module, others) in lines.filter(|(module, _)| is_wanted(module)) {
        for file in others.split_whitespace().chain([module]) {
            let copy = to.join(file);
            if let Some(folder) = copy.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::copy(version.path().join(file), copy)?;
        }
    }
    for list in ["modules.builtin", "modules.order"] {
        fs::copy(version.path().join(list), to.join(list))?;
    }
    run("busybox", &["depmod", "-b", &root.display().to_string(), &name])
}
