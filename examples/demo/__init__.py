"""`make demo`: a GPT-2 or a Llama trained on real text, stock and fused side by side."""
