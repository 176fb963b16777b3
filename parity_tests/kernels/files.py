"""The test files that call a kernel, and so need CUDA or Triton's interpreter."""

ON_A_DEVICE = (
    "test_softmax_statistics.py",
    "test_softmax_gradient.py",
    "test_wiring.py",
    "test_compositions.py",
    "test_injected_bugs.py",
)
