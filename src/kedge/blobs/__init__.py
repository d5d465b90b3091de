"""Where the bytes are: adapters of `kedge.ports.Blobs`, and wrappers around them."""
