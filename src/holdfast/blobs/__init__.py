"""Where the bytes are: adapters of `holdfast.ports.Blobs`, and wrappers around them."""
