"""Several processes, one run: joining, host-side exchange, arrays between meshes."""
