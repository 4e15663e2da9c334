// Copies what a button names, and says so on the button.
element.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  const text = button.textContent;
  button.textContent = "copied";
  setTimeout(() => (button.textContent = text), 1500);
});
