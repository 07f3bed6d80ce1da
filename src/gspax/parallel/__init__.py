"""Several processes, one run: joining them, exchange between hosts, arrays between meshes."""
