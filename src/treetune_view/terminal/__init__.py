"""`treetune watch`: how experiments stand, and one of them closely, in a terminal. It only reads."""
