//! The page: a live view of a run in a browser. Its documents are part of the program, and it asks
//! nobody but this server.

mod state; //  counters, as JSON
mod answer; // answers about the run, as JSON
mod token; //  the secret of those who may change knobs
mod guard; //  requests that another site made

use hyper::header::{CONTENT_SECURITY_POLICY, HeaderValue, REFERRER_POLICY, X_FRAME_OPTIONS};
use hyper::{HeaderMap, Method};

pub(crate) use answer::{ApiAnswer, explain, knobs, map, set};
pub(crate) use guard::{is_forwarded, is_of_other_site, is_same_origin, is_token_given};
pub(crate) use state::state;
pub use token::{PageToken, TOKEN_CHARS_MIN};

/// Header that has the token.
pub const TOKEN_HEADER: &str = "x-forebay-token";

/// Upper bound of the body of a request, in bytes.
pub(crate) const BODY_BYTES_MAX: usize = 4096;

/// Sources that a browser may load: this server only, and no script within the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// Document of the page.
pub(crate) struct PageFile {
    path: &'static str,
    pub(crate) content_type: &'static str,
    pub(crate) text: &'static str,
}

const FILES: [PageFile; 7] = [
    PageFile {
        path: "/",
        content_type: "text/html; charset=utf-8",
        text: include_str!("assets/index.html"),
    },
    PageFile { path: "/page.css", content_type: "text/css", text: include_str!("assets/page.css") },
    script("/page.js", include_str!("assets/page.js")),
    script("/draw.js", include_str!("assets/draw.js")),
    script("/flow.js", include_str!("assets/flow.js")),
    script("/knobs.js", include_str!("assets/knobs.js")),
    PageFile {
        path: "/icon.svg",
        content_type: "image/svg+xml",
        text: include_str!("assets/icon.svg"),
    },
];

const fn script(path: &'static str, text: &'static str) -> PageFile {
    PageFile { path, content_type: "text/javascript; charset=utf-8", text }
}

/// Document of the page at this path.
pub(crate) fn file(path: &str) -> Option<&'static PageFile> {
    FILES.iter().find(|file| file.path == path)
}

/// Question or change that a path stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Api {
    State,
    Knobs,
    Map,
    Explain,
    Set,
}

impl Api {
    pub(crate) fn of(path: &str) -> Option<Self> {
        Some(match path {
            "/api/state" => Self::State,
            "/api/knobs" => Self::Knobs,
            "/api/map" => Self::Map,
            "/api/explain" => Self::Explain,
            "/api/set" => Self::Set,
            _ => return None,
        })
    }

    /// True if requests with this method are answered.
    pub(crate) fn takes(self, method: &Method) -> bool {
        match self {
            Self::Set => method == Method::POST,
            _ => method == Method::GET,
        }
    }

    /// Methods that are answered.
    pub(crate) fn methods(self) -> &'static str {
        if self == Self::Set { "POST" } else { "GET" }
    }
}

/// Adds the headers that keep other sites and their scripts out of the page.
pub(crate) fn protect(headers: &mut HeaderMap) {
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    let same_origin = HeaderValue::from_static("same-origin");
    headers.insert("cross-origin-resource-policy", same_origin.clone());
    headers.insert("cross-origin-opener-policy", same_origin);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pag_1_page_loads_only_own_files() {
        for file in &FILES {
            // Nothing from elsewhere; the one address is the name of SVG's elements.
            let svg = "http://www.w3.org/2000/svg";
            let text = file.text.replace(svg, "");
            assert!(!text.contains("http:") && !text.contains("https:"), "{}", file.path);
            assert!(!text.contains("innerHTML") && !text.contains("eval("), "{}", file.path);
        }
        let page = file("/").map_or("", |file| file.text);
        assert!(!page.contains("<style") && !page.contains(" style=") && !page.contains(" on"));
        for part in page.split("src=\"").skip(1).chain(page.split("href=\"").skip(1)) {
            let path = part.split('"').next().unwrap_or_default();
            assert!(file(path).is_some(), "{path} is not there");
        }
        assert_eq!(
            page.matches("<script").count(),
            page.matches("<script type=\"module\" src=").count()
        );
    }

    #[test]
    fn pag_1_scripts_import_own_files() {
        for file in &FILES {
            for part in file.text.split("from \"").skip(1) {
                let path = part.split('"').next().unwrap_or_default();
                assert!(super::file(path).is_some(), "{}: {path} is not there", file.path);
            }
        }
    }
}
