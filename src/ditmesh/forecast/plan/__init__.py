"""`ditmesh plan`: what is planned for, the page, and the measuring of the best few."""
