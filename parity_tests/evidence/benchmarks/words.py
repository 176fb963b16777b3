"""The page's words for each section: its promise, and the reason of a miss that its run cannot tell."""

PROMISED = {
    "Engines": "examples a second, and the seconds until a failure is reported",
    "A verdict from the shell": "the seconds of a command, and examples a second",
    "Ends and stalls": "no leftover process, no false stall",
    "False alarms, bytes, compilation": "no false alarm, bytes as declared",
    "Sensitivity": "the smallest injected error that is caught",
    "Injected bugs": "the share that is caught",
    "Log-probability beside its peers": "CPU time, forward and backward; four products: a lower bound from"
    " hidden states, their four matrix products alone",
    "Log-probability among sampled tokens beside full rows": "CPU time with top-k and top-p; full rows: each rank"
    " gathers all ids of some tokens",
    "The smallest call beside plain torch": "CPU time of a call with 64 logits",
    "A packed batch beside its plain preparation": "CPU time of the preparation",
    "Index arrays of packed batches": "CPU time of the arrays",
    "Ring attention beside one process": "CPU time of all ranks together",
    "Dispatch and combine of tokens beside their messages": "CPU time of all ranks; wire: the bare messages",
    "Mamba2 on packed sequences beside a loop": "CPU time of all ranks to redistribute tokens around a Mamba2 layer;"
    " its exchange alone: the bare messages; order alone: without them; a loop: one sequence after another",
    "Kernels on a GPU": "time beside a copy of as many bytes, and memory, on one H100",
    "The gate": "the minutes of all tests and checks",
}
REASONS = {
    "The smallest call beside plain torch": "Python calls and operations, which a call of any size has",
    "Kernels on a GPU": "the GPU waits for the CPU, which queues some twenty small operations",
}
