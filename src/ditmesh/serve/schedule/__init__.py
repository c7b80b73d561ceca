"""Which requests take their next steps on which ranks: costs, decisions, admission. No torch, no I/O."""
