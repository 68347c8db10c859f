"""The mathematics of a step: rewards → advantages → loss → one normaliser. Pure, torch only, no run, no process.

`batching.make_batch` is the controller's entry and imports torch inside the call; everything else takes tensors and
returns tensors.
"""
