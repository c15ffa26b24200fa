"""`torchweld demo`: a GPT-2 trained on real text, with torchweld's ops and without, side by side."""
