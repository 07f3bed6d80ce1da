"""The engines that a run samples with: this process's devices, or servers, behind one contract (`engines.contract`)."""
