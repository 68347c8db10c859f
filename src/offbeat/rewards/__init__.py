"""Rewards: Python functions that grade completions, in worker processes that are killed at a deadline.

    pool.RewardPool (controller) ── chunks of samples ──▶ worker (process) ──▶ the user's functions
         watches a shared page that says which sample is being graded since when, and ends the worker when it is over

`functions` names, finds and checks reward functions without running them; `values` says what they may return.
"""
