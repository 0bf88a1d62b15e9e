//! What is sent to a device, the kernel receives.

use crate::Test;

pub(crate) const TESTS: &[Test] = &[];
