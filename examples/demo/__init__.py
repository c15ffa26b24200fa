"""`make demo`: a GPT-2, a Llama or an OLMoE trained on real text, stock beside fused."""
