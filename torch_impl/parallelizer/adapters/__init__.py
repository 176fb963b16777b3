"""Functions that stand under the names of other libraries: nvfsdp and Megatron-FSDP, and three small ones."""
