"""What a deployment costs before anything runs: parameters, memory, activated experts, bytes moved.

Formulas over `ModelConfig` and `ParallelConfig`; numpy at most, no torch. Symbols, everywhere in this package:

    H hidden · I expert width · h heads · E routed experts · k experts per token · L layers
    EP = DP·TP · e = E/EP experts per GPU · X = 3HI parameters of one expert · A attention parameters of one
    layer, of which A₀ = (q_lora + latent)·H are repeated on every TP rank
    B requests of one DP group · q tokens per request and step, 1 + drafts · t = B·q tokens of one DP group
    T = t·DP tokens of the whole deployment · kv tokens in a request's cache

GB = 1e9 bytes. Weights in block FP8 count 1 byte, BF16 2.
"""
