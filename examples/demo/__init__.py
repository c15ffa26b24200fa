"""`make demo`: a GPT-2 trained on real text, stock and fused side by side."""
