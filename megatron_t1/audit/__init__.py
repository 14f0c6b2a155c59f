"""Does training see exactly what the sampler saw and produced? Needs neither torch nor vLLM.

findings    what can be wrong, and what the audit of one trajectory says
view        a trajectory as a training step reads it
evidence    the exchange logs beside the records
model       what the model directory says of the facts in a record's contract
compare     the two against each other, token by token
run         many trajectories, from paths; the report of `t1 audit`
guard       the cheap part, called by the training phases before they use a rollout
baseline    what decoding, parsing, rendering and encoding would have made of the same trajectories
rescore     the same tokens scored again by an engine
"""
