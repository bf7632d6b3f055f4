"""What happens between the qkv product and attention, in one launch; the references are those of its parts."""
