"""What machine this is, or a typical one to plan for."""
