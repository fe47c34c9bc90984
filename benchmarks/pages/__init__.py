"""From results to tables, pictures and pages."""
