// Takes a photo by drop, paste, file dialogue or camera, uploads it, and names it to Python.
// gr.Image refuses what the browser has no type for (HEIC on many systems, MPO) without a word.
const limit = props.max_bytes;

const say = (message) => {
  props.value = { ...props.value, message };
};

// Gradio puts equal files of one name into one place, and what one visitor reads is deleted.
const renamed = (file) => {
  const random = crypto.getRandomValues(new Uint32Array(4)).join("-");
  return new File([file], `${random}.photo`, { type: file.type });
};

const send = async (file) => {
  if (!file) return;
  if (file.size > limit) {
    say(`${file.name} is larger than ${limit / 1e6} MB; send a smaller copy.`);
    return;
  }
  say(`Uploading ${file.name} …`);
  try {
    const { path } = await upload(renamed(file));
    props.value = { picture: "", message: `Reading ${file.name} …`, name: file.name, path };
    trigger("upload");
  } catch (error) {
    say(`${file.name} did not arrive; check the connection and send it again.`);
  }
};

const stopCamera = () => {
  const video = element.querySelector("video");
  video.srcObject?.getTracks().forEach((track) => track.stop());
  video.srcObject = null;
  element.querySelector(".camera").hidden = true;
};

const startCamera = async () => {
  try {
    const video = element.querySelector("video");
    video.srcObject = await navigator.mediaDevices.getUserMedia({
      video: { facingMode: "environment", width: { ideal: 1920 } },
    });
    element.querySelector(".camera").hidden = false;
    await video.play();
  } catch (error) {
    say("The camera cannot be used; allow it in the browser, or choose a file.");
  }
};

const shoot = () => {
  const video = element.querySelector("video");
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  canvas.getContext("2d").drawImage(video, 0, 0);
  stopCamera();
  canvas.toBlob((blob) => send(new File([blob], "camera.jpg", { type: blob.type })), "image/jpeg", 0.95);
};

// The listeners stand on what outlives a new value of the template.
element.addEventListener("change", (event) => {
  if (event.target.matches("input[type=file]")) send(event.target.files[0]);
});
element.addEventListener("click", (event) => {
  if (event.target.matches(".use-camera")) startCamera();
  if (event.target.matches(".shoot")) shoot();
  if (event.target.matches(".stop-camera")) stopCamera();
});
for (const name of ["dragover", "dragleave", "drop"]) {
  element.addEventListener(name, (event) => {
    event.preventDefault();
    element.querySelector(".photo-drop").classList.toggle("over", name === "dragover");
    if (name === "drop") send(event.dataTransfer.files[0]);
  });
}
document.addEventListener("paste", (event) => {
  const file = event.clipboardData?.files[0];
  if (file && element.offsetParent) send(file); // not while another tab is shown
});
