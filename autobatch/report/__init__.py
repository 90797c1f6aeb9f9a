"""Records in; terminal text, figures and one-file pages out. Nothing here imports torch."""
