"""`ditmesh plan`: its subject, its page, and measurements of the best configurations."""
