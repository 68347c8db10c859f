"""Weight synchronisation: one bounded, verified transaction from the trainer to every engine. See docs/weight-sync.md.

    controller      sync       the transaction: offer → prepare → move → verify → probe → commit
    trainer         sender     reads a WeightSource, packs, sends
    engine          receiver   receives, loads into a WeightSink, digests the model's memory
    pure            session (states), packing (the plan), manifest, verify (digests)
    torch           layout (live memory as the checkpoint on disk), lane, member, rendezvous, group

`sync`, `session` and `packing` load no torch.
"""
