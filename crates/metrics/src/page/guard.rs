//! Requests that another site's page made in a browser (cross-site request forgery).

use hyper::HeaderMap;
use hyper::header::{HOST, HeaderName, ORIGIN};

use super::TOKEN_HEADER;
use super::token::PageToken;

/// Header in which a browser says whose page made the request.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// True if a browser says that another site's page made the request.
pub(crate) fn is_of_other_site(headers: &HeaderMap) -> bool {
    let mut sites = headers.get_all(FETCH_SITE).iter();
    sites.any(|site| !["same-origin", "none"].iter().any(|own| site == own))
}

/// Headers by which a proxy tells that it forwards a request.
const FORWARDED: [&str; 5] =
    ["forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-real-ip"];

/// True if a proxy says that the request came from elsewhere.
pub(crate) fn is_forwarded(headers: &HeaderMap) -> bool {
    FORWARDED.into_iter().any(|name| headers.contains_key(name))
}

/// True if the request says that a page of this server made it. A form or script of another site
/// cannot change the `Origin` header.
pub(crate) fn is_same_origin(headers: &HeaderMap) -> bool {
    let Some(origin) = only(headers, &ORIGIN) else { return false };
    let Some(host) = only(headers, &HOST) else { return false };
    // The scheme is that of a proxy in front, if there is one.
    let of_origin = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
    of_origin.is_some_and(|of_origin| of_origin.eq_ignore_ascii_case(host))
}

/// True if the request has the token, in a header that no form can have.
pub(crate) fn is_token_given(headers: &HeaderMap, token: &PageToken) -> bool {
    only(headers, &HeaderName::from_static(TOKEN_HEADER)).is_some_and(|given| token.is(given))
}

/// Value of a header that is there once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn pag_3_foreign_origin_changes_nothing() {
        let host = ("host", "127.0.0.1:9464");
        let is = |origin| is_same_origin(&headers(&[host, ("origin", origin)]));
        assert!(is("http://127.0.0.1:9464") && is("https://127.0.0.1:9464"));
        for origin in [
            "null",
            "",
            "127.0.0.1:9464",
            "http://127.0.0.1",
            "http://127.0.0.1:80",
            "http://127.0.0.1:9464.evil.example",
            "http://evil.example/127.0.0.1:9464",
            "file://127.0.0.1:9464",
        ] {
            assert!(!is(origin), "{origin}");
        }
        assert!(!is_same_origin(&headers(&[host])), "none is given");
        let origin = ("origin", "http://127.0.0.1:9464");
        assert!(!is_same_origin(&headers(&[host, origin, ("origin", "http://evil.example")])));
    }

    #[test]
    fn pag_3_browser_names_other_sites() {
        for (site, is_other) in
            [("same-origin", false), ("none", false), ("same-site", true), ("cross-site", true)]
        {
            assert_eq!(is_of_other_site(&headers(&[("sec-fetch-site", site)])), is_other, "{site}");
        }
        assert!(!is_of_other_site(&headers(&[])), "not a browser");
        let both = [("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")];
        assert!(is_of_other_site(&headers(&both)));
    }

    #[test]
    fn pag_3_token_is_given_once() {
        let token: PageToken = "0123456789abcdef".parse().unwrap();
        let is = |pairs: &[_]| is_token_given(&headers(pairs), &token);
        let right = (TOKEN_HEADER, "0123456789abcdef");
        assert!(is(&[right]));
        for wrong in ["", "0123456789abcde", "0123456789abcdef0", "0123456789abcdeF"] {
            assert!(!is(&[(TOKEN_HEADER, wrong)]), "{wrong}");
            assert!(!is(&[right, (TOKEN_HEADER, wrong)]), "{wrong}");
        }
        assert!(!is(&[("cookie", "x-forebay-token=0123456789abcdef")]));
    }
}
