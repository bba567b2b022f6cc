"""The operations of a layer, one file each: the contract and its plain-torch reference."""
