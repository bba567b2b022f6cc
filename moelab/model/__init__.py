"""The reference DeepSeek-V3 model: plain torch, one rank's share of it, a method for every stage of a layer."""
