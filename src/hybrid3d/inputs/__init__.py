"""Models and data as a run reads them, and as it exports them."""
