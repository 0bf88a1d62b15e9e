//! Files served by hyper over our streams, and curl at the far end.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use forebay::Via;
use forebay_tokio::TcpListener;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;

use crate::Hosts;
use crate::service::{Site, answer};

/// Serves the files of a directory until the run ends.
async fn serve(listener: TcpListener, site: Arc<Site>) {
    while let Ok((stream, _)) = listener.accept().await {
        stream.set_nodelay(true).unwrap();
        let site = Arc::clone(&site);
        tokio::spawn(async move {
            let service = service_fn(|request| answer(request, &site));
            http1::Builder::new().serve_connection(TokioIo::new(stream), service).await
        });
    }
}

/// Files of many lengths are loaded and stored by curl, over one connection each and over one for all.
pub(crate) fn curl(via: Via) {
    let hosts = Hosts::new(via);
    let runtime = hosts.runtime();
    let root = tempfile::tempdir().unwrap();
    let (net, path) = (hosts.net.clone(), root.path().to_owned());
    let listener = hosts.near.run(|| {
        let listener = forebay::net::TcpListener::bind(&net, "10.9.0.1:80").unwrap();
        let _inside = runtime.enter();
        TcpListener::new(listener).unwrap()
    });
    let site = Arc::new(Site { root: path.clone(), net: Some(hosts.net.clone()) });
    let server = runtime.spawn(serve(listener, site));
    let curl = |arguments: &str| {
        let output = hosts.far.run(|| {
            Command::new("curl").args(["-s", "-f"]).args(arguments.split(' ')).output().unwrap()
        });
        assert!(output.status.success(), "curl {arguments}: {output:?}");
        output.stdout
    };
    for len in [0, 1, 1448, 100_000, 20_000_000] {
        let bytes: Vec<u8> = (0..len).map(|at| u8::try_from(at / 13 % 251).unwrap()).collect();
        std::fs::write(path.join("file"), &bytes).unwrap();
        assert!(curl("http://10.9.0.1/file") == bytes, "{len} bytes differ");
        let file = path.join("file").display().to_string();
        curl(&format!("-T {file} http://10.9.0.1/stored"));
        assert!(std::fs::read(path.join("stored")).unwrap() == bytes, "{len} stored bytes differ");
    }
    curl("http://10.9.0.1/stored http://10.9.0.1/file -o /dev/null -o /dev/null");
    let counters = String::from_utf8(curl("http://10.9.0.1/counters")).unwrap();
    assert!(counters.contains("\"PassiveOpens\":12"), "{counters}");
    refuse_what_is_no_file(&path, |name, arguments| {
        let status = "-s -o /dev/null -w %{http_code}";
        let arguments = format!("{status} {arguments} http://10.9.0.1/{name}");
        let output = hosts.far.run(|| Command::new("curl").args(arguments.split(' ')).output());
        String::from_utf8(output.unwrap().stdout).unwrap()
    });
    drop(net);
    let net = hosts.net.clone();
    hosts.stopper.stop();
    runtime.block_on(server).unwrap();
    drop(runtime);
    let mut outcome = hosts.engine.unwrap().join().unwrap().unwrap();
    assert_eq!(net.frames_away(&mut outcome), 0);
}

/// A directory and a FIFO are neither sent nor written to.
fn refuse_what_is_no_file(root: &Path, status: impl Fn(&str, &str) -> String) {
    std::fs::create_dir(root.join("directory")).unwrap();
    assert!(Command::new("mkfifo").arg(root.join("fifo")).status().unwrap().success());
    for name in ["directory", "fifo"] {
        assert_eq!(status(name, "-X GET"), "403", "{name}");
        assert_eq!(status(name, "-X PUT --data-binary bytes"), "403", "{name}");
    }
}
