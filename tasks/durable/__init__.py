"""What makes a step happen exactly once."""
