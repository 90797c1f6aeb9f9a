"""Models of other libraries, as their users build them: runs and out-of-memory errors of a probe."""
