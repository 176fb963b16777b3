"""Functions of other libraries' APIs: nvfsdp and Megatron-FSDP, and three small ones."""
