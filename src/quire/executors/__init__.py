"""What computes plans: `base` has the contract and what executors share, `worker` runs steps on a
thread, `sampler` chooses tokens; the others are executors."""
