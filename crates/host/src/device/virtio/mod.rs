//! virtio-net over vhost-user: a driver in user space, safe against a device that lies.

mod options; //  how a back end is reached, and what is asked of it

pub use options::{
    BufferPolicy, QUEUE_SIZE_DEFAULT, QUEUE_SIZE_MAX, QUEUE_SIZE_MIN, RX_BUFFER_MAX_BYTES_DEFAULT,
    Role, VirtioOptions,
};
