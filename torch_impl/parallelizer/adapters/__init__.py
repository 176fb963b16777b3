"""Functions with other libraries' interfaces: nvfsdp and Megatron-FSDP, and three small ones."""
