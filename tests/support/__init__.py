"""What tests share: servers, faults, the ledger."""
