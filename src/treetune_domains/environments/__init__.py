"""What a policy acts in, turn by turn: text in, text out."""
