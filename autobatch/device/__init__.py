"""The devices: what memory there is, how a budget is enforced, and what a step really took."""
