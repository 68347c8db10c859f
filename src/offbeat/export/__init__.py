"""A saved model as a folder for others: weights at a dtype, tokenizer, model card; checked; pushed to a hub if asked.

weights   what is written, and the proof that it is the checkpoint's model (torch)
card      README.md from the run's own records        push   the hub, behind a seam
"""
